"""The hccl backend: refusal of host tensors, laziness, counting, dead peers."""

import multiprocessing
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.testing import simnpu
from tests.ranks import HOST_AND_NPU, RankFailedError, run_ranks

pytestmark = pytest.mark.simnpu

NEVER_US = 3600e6  # longer than any test; only for ranks that never synchronise


def ranks(fn: Callable[[int], object], num_ranks: int = 2, **options: object) -> list[object]:
    return run_ranks(fn, num_ranks, **{"backend": "hccl", **options})


def survivor_of(fn: Callable[[int], object], *, group_timeout_s: float) -> None:
    """Run `fn` on two ranks, of which rank 1 dies in it. What rank 0 asserts is the test."""
    with pytest.raises(RankFailedError) as caught:
        ranks(fn, timeout_s=20, group_timeout_s=group_timeout_s)
    assert str(caught.value) == "--- rank 1 ---\ndied without a word"


def test_cpu_tensor_raises_exactly_the_known_message() -> None:
    def fn(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        return str(caught.value)

    assert ranks(fn) == ["No backend type associated with device type cpu"] * 2


def test_mixed_backend_takes_both_kinds_of_tensor() -> None:
    def fn(rank: int) -> list[float]:
        tensors = [torch.ones(1), torch.ones(1, device="npu")]
        for tensor in tensors:
            dist.all_reduce(tensor)
        return [tensor.item() for tensor in tensors]

    assert ranks(fn, backend=HOST_AND_NPU) == [[2.0, 2.0]] * 2


def test_gloo_group_beside_hccl_takes_cpu_tensors_only() -> None:
    def fn(rank: int) -> float:
        group = dist.new_group(backend="gloo")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        with pytest.raises(RuntimeError, match="device type npu"):
            dist.all_reduce(torch.ones(1, device="npu"), group=group)
        return tensor.item()

    assert ranks(fn) == [2.0, 2.0]


def test_result_read_before_wait_is_the_old_one_every_time() -> None:
    def fn(rank: int) -> list[list[float]]:
        tensor = torch.ones(2, device="npu")
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.2)  # gloo is done by now; the device's memory must not show it
        early = tensor.tolist()
        work.wait()
        return [early, tensor.tolist()]

    assert ranks(fn) == [[[1.0, 1.0], [2.0, 2.0]]] * 2


def test_wait_orders_the_stream_and_does_not_hold_the_host() -> None:
    def fn(rank: int) -> tuple[int, int, int]:
        tensor = torch.ones(2, device="npu")
        simnpu.reset_counters()
        dist.all_reduce(tensor)
        counters = simnpu.counters()
        return counters["collectives"], counters["collective_bytes"], counters["host_syncs"]

    assert ranks(fn) == [(1, 8, 0)] * 2


def test_copies_and_collective_make_one_round_trip() -> None:
    def fn(rank: int) -> tuple[float, float, dict[str, int]]:
        host = torch.full((1,), rank + 1.0, pin_memory=True)
        device = torch.empty(1, device="npu")
        event = torch.npu.Event()
        simnpu.reset_counters()
        device.copy_(host, non_blocking=True)
        dist.all_reduce(device)
        host.copy_(device, non_blocking=True)
        early = host.item()
        event.record()
        event.synchronize()
        counters = simnpu.counters()
        names = ("h2d", "collectives", "d2h", "host_syncs", "kernels", "early_rewrites")
        return early, host.item(), {name: counters[name] for name in names}

    expected = {
        "h2d": 1,
        "collectives": 1,
        "d2h": 1,
        "host_syncs": 1,
        "kernels": 0,
        "early_rewrites": 0,
    }
    assert ranks(fn) == [(1.0, 3.0, expected), (2.0, 3.0, expected)]


def test_pinned_buffer_rewritten_after_the_collective_but_before_a_wait_is_noticed() -> None:
    def fn(rank: int) -> int:
        host = torch.ones(1, pin_memory=True)
        device = torch.empty(1, device="npu")
        device.copy_(host, non_blocking=True)
        dist.all_reduce(device)
        host.fill_(9)
        torch.npu.synchronize()
        return simnpu.counters()["early_rewrites"]

    assert ranks(fn) == [1, 1]


def test_barrier_holds_the_host() -> None:
    has_come = multiprocessing.get_context("fork").Event()

    def fn(rank: int) -> tuple[bool, int]:
        if rank == 1:
            time.sleep(0.3)  # so that a barrier that does not hold rank 0 is seen to let it pass
            has_come.set()
        dist.barrier(device_ids=[rank])
        return has_come.is_set(), simnpu.counters()["host_syncs"]

    assert ranks(fn) == [(True, 1)] * 2


def test_collective_is_incomplete_while_its_simulated_time_lasts() -> None:
    def fn(rank: int) -> bool:
        simnpu.configure(collective_us=NEVER_US)
        return dist.all_reduce(torch.ones(1, device="npu"), async_op=True).is_completed()

    assert ranks(fn) == [False] * 2


def test_collective_is_complete_after_synchronisation() -> None:
    def fn(rank: int) -> bool:
        simnpu.configure(collective_us=1000)
        work = dist.all_reduce(torch.ones(1, device="npu"), async_op=True)
        work.wait()
        torch.npu.synchronize()
        return work.is_completed()

    assert ranks(fn) == [True] * 2


def test_group_created_before_set_device_is_covered_by_device_synchronisation() -> None:
    def fn(rank: int) -> int:
        torch.npu.set_device(0)
        group = dist.new_group()
        torch.npu.set_device(rank)
        host = torch.ones(1, pin_memory=True)
        device = torch.empty(1, device="npu")
        device.copy_(host, non_blocking=True)
        dist.all_reduce(device, group=group, async_op=True)
        torch.npu.synchronize()
        return int(device.item())

    assert ranks(fn) == [2, 2]


def all_reduce_and_wait(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    torch.npu.synchronize()


def synchronise_device(_tensor: torch.Tensor) -> None:
    torch.npu.synchronize()


def run_a_kernel(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def wait_for_an_event(_tensor: torch.Tensor) -> None:
    event = torch.npu.Event()
    event.record()
    event.synchronize()


@pytest.mark.parametrize(
    "touch", [synchronise_device, run_a_kernel, wait_for_an_event, torch.Tensor.tolist]
)
def test_dead_peer_raises_where_the_result_is_needed(
    touch: Callable[[torch.Tensor], object],
) -> None:
    def fn(rank: int) -> None:
        dist.barrier(device_ids=[rank])
        if rank == 1:
            time.sleep(0.3)
            os._exit(0)  # while rank 0 waits for it
        tensor = torch.ones(2, device="npu")
        dist.all_reduce(tensor)
        with pytest.raises(RuntimeError, match=r"gloo|Gloo|[Cc]onnection|peer"):
            touch(tensor)
        # The device works on, and another collective fails again instead of hanging.
        with pytest.raises(RuntimeError):
            all_reduce_and_wait(tensor)
        assert torch.ones(2, device="npu").sum().item() == 2.0

    survivor_of(fn, group_timeout_s=5)


def test_peer_that_died_before_raises_within_the_groups_timeout() -> None:
    def fn(rank: int) -> None:
        dist.barrier(device_ids=[rank])
        if rank == 1:
            os._exit(0)
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match=r"Timed out|[Cc]onnection"):
            all_reduce_and_wait(torch.ones(2, device="npu"))

    survivor_of(fn, group_timeout_s=2)


def test_absent_peer_raises_at_the_groups_timeout() -> None:
    has_raised = multiprocessing.get_context("fork").Event()

    def fn(rank: int) -> str:
        if rank == 1:
            has_raised.wait(15)  # alive, and not taking part
            return "absent"
        dist.all_reduce(torch.ones(2, device="npu"))
        with pytest.raises(RuntimeError) as caught:
            torch.npu.synchronize()
        has_raised.set()
        return str(caught.value)

    message, _ = ranks(fn, timeout_s=14, group_timeout_s=1.0)
    assert "Timed out waiting 1000ms" in message
