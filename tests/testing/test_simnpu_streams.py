"""A missing synchronisation gives the wrong answer, and does so every time."""

from collections.abc import Callable

import pytest
import torch

from hyper_parallel.testing import simnpu
from tests.ranks import run_ranks

pytestmark = pytest.mark.simnpu


def wait_for_event() -> None:
    event = torch.npu.Event()
    event.record()
    event.synchronize()


def query_event() -> None:
    event = torch.npu.Event()
    event.record()
    assert event.query()


def wait_through_another_stream() -> None:
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    side.synchronize()


def read_a_scalar() -> None:
    torch.ones((), device="npu").item()


ways_to_synchronise = pytest.mark.parametrize(
    "synchronise",
    [
        wait_for_event,
        query_event,
        lambda: torch.npu.current_stream().synchronize(),
        torch.npu.synchronize,
        wait_through_another_stream,
        read_a_scalar,
    ],
    ids=["event", "query", "stream", "device", "other-stream", "scalar"],
)


@ways_to_synchronise
def test_copy_to_host_arrives_only_with_synchronisation(synchronise: Callable[[], None]) -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.full((3,), 7.0, device="npu"), non_blocking=True)
    assert host.tolist() == [0.0] * 3
    synchronise()
    assert host.tolist() == [7.0] * 3


def test_kernel_after_copy_to_host_does_not_make_it_arrive() -> None:
    host = torch.zeros(3, pin_memory=True)
    device = torch.full((3,), 7.0, device="npu")
    host.copy_(device, non_blocking=True)
    device.mul_(2)
    assert host.tolist() == [0.0] * 3
    torch.npu.synchronize()
    assert host.tolist() == [7.0] * 3  # as it was when the copy's turn came


def test_synchronising_an_earlier_event_does_not_make_a_later_copy_arrive() -> None:
    host = torch.zeros(2, pin_memory=True)
    event = torch.npu.Event()
    event.record()
    host.copy_(torch.ones(2, device="npu"), non_blocking=True)
    event.synchronize()
    assert host.tolist() == [0.0, 0.0]


def test_pinned_buffer_rewritten_before_the_copy_shows_on_the_device() -> None:
    host = torch.full((3,), 1.0, pin_memory=True)
    device = torch.zeros(3, device="npu")
    device.copy_(host, non_blocking=True)
    host.fill_(9)
    torch.npu.synchronize()
    assert device.tolist() == [9.0] * 3


def test_pinned_buffer_rewritten_after_synchronisation_does_not_show() -> None:
    host = torch.full((3,), 1.0, pin_memory=True)
    device = torch.zeros(3, device="npu")
    device.copy_(host, non_blocking=True)
    torch.npu.synchronize()
    host.fill_(9)
    torch.npu.synchronize()
    assert device.tolist() == [1.0] * 3
    assert simnpu.counters()["early_rewrites"] == 0


def test_pinned_buffer_rewritten_after_a_kernel_read_it_counts_as_early_rewrite() -> None:
    # The kernel needs the bytes now, so the device has the right ones. On hardware it might not.
    host = torch.full((3,), 1.0, pin_memory=True)
    device = torch.zeros(3, device="npu")
    device.copy_(host, non_blocking=True)
    doubled = device * 2
    host.fill_(9)
    assert doubled.tolist() == [2.0] * 3
    assert simnpu.counters()["early_rewrites"] == 1


def test_pageable_copies_are_not_asynchronous() -> None:
    host = torch.zeros(3)
    host.copy_(torch.ones(3, device="npu"), non_blocking=True)
    assert host.tolist() == [1.0] * 3


def test_copy_from_a_buffer_the_device_wrote_needs_no_host() -> None:
    host = torch.zeros(3, pin_memory=True)
    device = torch.zeros(3, device="npu")
    host.copy_(torch.full((3,), 4.0, device="npu"), non_blocking=True)
    device.copy_(host, non_blocking=True)
    assert device.tolist() == [4.0] * 3


def test_device_that_overwrites_a_buffer_it_read_is_no_early_rewrite() -> None:
    host = torch.full((3,), 1.0, pin_memory=True)
    devices = [torch.zeros(3, device="npu") for _ in range(2)]
    devices[0].copy_(host, non_blocking=True)
    host.copy_(torch.full((3,), 4.0, device="npu"), non_blocking=True)
    devices[1].copy_(host, non_blocking=True)
    torch.npu.synchronize()
    assert [device.tolist() for device in devices] == [[1.0] * 3, [4.0] * 3]
    assert simnpu.counters()["early_rewrites"] == 0


def test_older_copy_does_not_overwrite_a_newer_one() -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.full((3,), 1.0, device="npu"), non_blocking=True)
    host.copy_(torch.full((3,), 2.0, device="npu"))
    torch.npu.synchronize()
    assert host.tolist() == [2.0] * 3


def test_reading_another_streams_work_without_wait_sees_old_bytes() -> None:
    host = torch.full((3,), 5.0, pin_memory=True)
    device = torch.zeros(3, device="npu")
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        device.copy_(host, non_blocking=True)
    assert device.tolist() == [0.0] * 3
    torch.npu.current_stream().wait_stream(side)
    assert device.tolist() == [5.0] * 3


def test_stream_context_restores_the_previous_stream() -> None:
    before = torch.npu.current_stream()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
    assert torch.npu.current_stream() == before


def test_device_context_restores_the_previous_device() -> None:
    with torch.npu.device(3):
        assert torch.ones(1, device="npu").device.index == 3
    assert torch.npu.current_device() == 0


def test_work_runs_on_the_stream_of_its_tensors_device() -> None:
    other = torch.device("npu", 1)
    source = torch.arange(4.0).pin_memory()
    assert torch.npu.current_device() == 0
    copied = source.to(other, non_blocking=True)
    doubled = torch.empty(4).pin_memory()
    doubled.copy_(copied * 2, non_blocking=True)
    torch.npu.synchronize(0)
    assert doubled.tolist() != [0.0, 2.0, 4.0, 6.0]
    torch.npu.synchronize(other)
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_device_index_out_of_range_names_the_limit() -> None:
    with pytest.raises(RuntimeError, match="not below the number of simulated devices"):
        torch.npu.set_device(100)


def test_copy_that_is_still_queued_keeps_its_memory_alive() -> None:
    device = torch.zeros(64, device="npu")
    device.copy_(torch.full((64,), 3.0, pin_memory=True), non_blocking=True)
    others = [torch.full((64,), 8.0, pin_memory=True) for _ in range(20)]
    assert len(others) == 20
    assert device.tolist() == [3.0] * 64


def test_latency_is_simulated_time_between_events() -> None:
    simnpu.configure(copy_us=1000)
    host = torch.zeros(3, pin_memory=True)
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    host.copy_(torch.ones(3, device="npu"), non_blocking=True)
    end.record()
    end.synchronize()
    assert end.query()
    assert host.tolist() == [1.0] * 3
    assert start.elapsed_time(end) >= 0.999


def in_a_process_that_never_synchronises(fn: Callable[[int], bool]) -> bool:
    """Run `fn` where a copy takes an hour, so that no pause of the host outlasts it."""

    def configure_and_run(rank: int) -> bool:
        simnpu.configure(copy_us=3600e6)
        return fn(rank)

    (answer,) = run_ranks(configure_and_run, 1, backend="none")
    return answer


def test_latency_enqueue_returns_before_the_copy_is_done() -> None:
    def is_done(rank: int) -> bool:
        host = torch.zeros(3, pin_memory=True)
        end = torch.npu.Event()
        host.copy_(torch.ones(3, device="npu"), non_blocking=True)
        end.record()
        return end.query() or host.tolist() != [0.0] * 3

    assert not in_a_process_that_never_synchronises(is_done)


def test_latency_does_not_stop_the_host_at_a_kernel() -> None:
    def is_done(rank: int) -> bool:
        device = torch.zeros(3, device="npu")
        end = torch.npu.Event()
        device.copy_(torch.ones(3, pin_memory=True), non_blocking=True)
        device.mul_(2)
        end.record()
        return end.query()

    assert not in_a_process_that_never_synchronises(is_done)


def test_latency_is_inherited_by_a_stream_that_waits() -> None:
    def is_done(rank: int) -> bool:
        device = torch.zeros(3, device="npu")
        device.copy_(torch.ones(3, pin_memory=True), non_blocking=True)
        side = torch.npu.Stream()
        assert side.query()
        side.wait_stream(torch.npu.current_stream())
        return side.query()

    assert not in_a_process_that_never_synchronises(is_done)


def test_latency_grows_with_size() -> None:
    simnpu.configure(copy_us_per_mib=1000)
    device = torch.zeros(2**20, device="npu")
    host = torch.zeros(2**20, pin_memory=True)
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    device.copy_(host, non_blocking=True)
    end.record()
    assert start.elapsed_time(end) >= 3.99


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_configure_rejects_durations_that_cannot_be(value: float) -> None:
    with pytest.raises(ValueError, match="copy_us must be a finite number >= 0"):
        simnpu.configure(copy_us=value)
