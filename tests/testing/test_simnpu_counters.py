"""Counters tell exactly what a program asked of the device."""

from collections.abc import Callable

import pytest
import torch

from hyper_parallel.testing import simnpu
from tests.ranks import run_ranks

pytestmark = pytest.mark.simnpu

ALWAYS_PRESENT = {
    "h2d",
    "d2h",
    "h2d_bytes",
    "d2h_bytes",
    "h2d_async",
    "d2h_async",
    "collectives",
    "collective_bytes",
    "host_syncs",
    "event_sync",
    "stream_sync",
    "device_sync",
    "kernels",
    "pinned_allocs",
    "early_rewrites",
}


def changed() -> dict[str, int]:
    return {
        name: count
        for name, count in simnpu.counters().items()
        if count and not name.startswith(("device_bytes", "pinned_bytes"))
    }


def test_always_present_counters_start_at_zero() -> None:
    counters = simnpu.counters()
    assert {name: counters[name] for name in ALWAYS_PRESENT} == dict.fromkeys(ALWAYS_PRESENT, 0)


def test_round_trip_with_one_wait_counts_one_of_each() -> None:
    host = torch.ones(10, pin_memory=True)
    device = torch.empty(10, device="npu")
    event = torch.npu.Event()
    simnpu.reset_counters()
    device.copy_(host, non_blocking=True)
    host.copy_(device, non_blocking=True)
    event.record()
    event.synchronize()
    assert changed() == {
        "h2d": 1,
        "h2d_async": 1,
        "h2d_bytes": 40,
        "d2h": 1,
        "d2h_async": 1,
        "d2h_bytes": 40,
        "event_sync": 1,
        "host_syncs": 1,
    }


def test_item_counts_as_one_copy_and_one_wait() -> None:
    scalar = torch.ones((), device="npu")
    simnpu.reset_counters()
    assert scalar.item() == 1.0
    counters = simnpu.counters()
    assert (counters["d2h"], counters["host_syncs"], counters["h2d"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda host, device: device.copy_(host), "h2d_blocking"),
        (lambda host, device: host.copy_(device), "d2h_blocking"),
        (lambda host, device: device.copy_(host, non_blocking=True), "h2d_pageable"),
        (lambda host, device: host.copy_(device, non_blocking=True), "d2h_pageable"),
    ],
    ids=["h2d-blocking", "d2h-blocking", "h2d-pageable", "d2h-pageable"],
)
def test_copy_that_holds_the_host_counts_as_wait(
    copy: Callable[[torch.Tensor, torch.Tensor], None], expected: str
) -> None:
    host, device = torch.ones(4), torch.ones(4, device="npu")
    simnpu.reset_counters()
    copy(host, device)
    direction = expected[:3]
    assert changed() == {direction: 1, f"{direction}_bytes": 16, expected: 1, "host_syncs": 1}


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 2).index_put_((x > 0,), x[0]),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
    ],
    ids=["nonzero", "masked_select", "mask-read", "mask-write", "unique", "equal"],
)
def test_op_with_data_dependent_result_counts_as_wait(
    op: Callable[[torch.Tensor], object],
) -> None:
    tensor = torch.ones(4, device="npu")
    simnpu.reset_counters()
    op(tensor)
    assert simnpu.counters()["host_syncs"] == 1


def test_plain_kernels_and_views_do_not_wait() -> None:
    tensor = torch.ones(4, 4, device="npu")
    simnpu.reset_counters()
    (tensor.t().reshape(16)[2:] + 1).mul_(2)
    counters = simnpu.counters()
    assert counters["host_syncs"] == 0
    assert counters["h2d"] == 0


def test_views_are_no_kernels() -> None:
    tensor = torch.ones(4, 4, device="npu")
    simnpu.reset_counters()
    tensor.view(2, 8)[1].unsqueeze(0).expand(3, -1).t().split(2)
    assert simnpu.counters()["kernels"] == 0


def test_one_foreach_call_is_one_kernel() -> None:
    tensors = [torch.ones(3, device="npu") for _ in range(50)]
    simnpu.reset_counters()
    torch._foreach_mul_(tensors, 0.5)
    assert simnpu.counters()["kernels"] == 1


def test_copies_of_nothing_are_not_counted() -> None:
    simnpu.reset_counters()
    torch.empty(0).to("npu")
    torch.empty(0, device="npu").cpu()
    assert changed() == {}


def test_trace_ops_counts_operators_by_name() -> None:
    tensor = torch.ones(4, device="npu")
    simnpu.configure(trace_ops=True)
    simnpu.reset_counters()
    tensor.add_(1).mul_(2).mul_(2)
    assert simnpu.counters()["op.aten::mul"] == 2


def test_reset_forgets_counts_and_keeps_levels() -> None:
    tensor = torch.ones(1024, device="npu")
    simnpu.reset_counters()
    assert simnpu.counters()["kernels"] == 0
    assert simnpu.counters()["device_bytes"] >= tensor.nbytes


def test_forked_process_starts_from_zero() -> None:
    torch.ones(4, device="npu").cpu()
    assert simnpu.counters()["d2h"] == 1
    assert run_ranks(lambda _rank: simnpu.counters()["d2h"], 1, backend="hccl") == [0]
