"""Device memory faults on the host, pinned memory is told apart from pageable memory."""

import ctypes
import faulthandler
import multiprocessing
import signal
from collections.abc import Callable

import pytest
import torch

from hyper_parallel.testing import simnpu

pytestmark = pytest.mark.simnpu


def read_float(address: int) -> float:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0]


def write_float(address: int) -> None:
    ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0] = 1.0


def exit_code_of(touch: Callable[[int], object], address: int) -> int | None:
    def child() -> None:
        faulthandler.disable()  # pytest's would print a traceback for the expected crash
        touch(address)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=20)
    return process.exitcode


@pytest.mark.parametrize("touch", [read_float, write_float])
def test_cpu_access_to_device_memory_crashes(touch: Callable[[int], object]) -> None:
    tensor = torch.ones(4, device="npu")
    assert exit_code_of(touch, tensor.data_ptr()) == -signal.SIGSEGV


@pytest.mark.parametrize("touch", [read_float, write_float])
def test_cpu_access_to_pinned_memory_is_fine(touch: Callable[[int], object]) -> None:
    tensor = torch.ones(4, pin_memory=True)
    assert exit_code_of(touch, tensor.data_ptr()) == 0


def test_numpy_of_device_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(4, device="npu").numpy()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(3), False),
        (torch.empty(3, pin_memory=True), True),
        (torch.empty(3).pin_memory(), True),
        (torch.empty(8, pin_memory=True)[5:], True),
    ],
    ids=["pageable", "pinned", "moved-to-pinned", "view-of-pinned"],
)
def test_is_pinned_tells_pinned_from_pageable(*, tensor: torch.Tensor, expected: bool) -> None:
    assert tensor.is_pinned() is expected


def test_freed_pinned_memory_is_pinned_no_longer() -> None:
    before = simnpu.counters()["pinned_bytes"]
    tensor = torch.empty(1024, pin_memory=True)
    assert simnpu.counters()["pinned_bytes"] == before + 4096
    del tensor
    assert simnpu.counters()["pinned_bytes"] == before


def test_device_bytes_follow_allocation_and_storage_resize() -> None:
    before = torch.npu.memory_allocated()
    tensor = torch.zeros(256, device="npu")
    assert torch.npu.memory_allocated() == before + 1024
    tensor.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() >= before + 1024


def test_storage_resize_keeps_the_first_bytes() -> None:
    tensor = torch.arange(4.0, device="npu")
    tensor.untyped_storage().resize_(32)
    longer = torch.empty(0, device="npu").set_(tensor.untyped_storage())
    assert longer[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_poison_fills_fresh_memory_with_nan() -> None:
    simnpu.configure(poison=True)
    assert torch.empty(16, device="npu").isnan().all().item()


def test_in_place_and_out_results_are_the_argument_itself() -> None:
    tensor = torch.ones(4, device="npu")
    out = torch.empty(0, device="npu")
    assert tensor.add_(1) is tensor
    torch.add(tensor, 1, out=out)
    assert out.shape == (4,)
    assert out.tolist() == [3.0] * 4


def test_view_shares_memory_with_its_base() -> None:
    base = torch.zeros(4, 4, device="npu")
    base.t()[1].fill_(5)
    assert base.cpu()[:, 1].tolist() == [5.0] * 4
