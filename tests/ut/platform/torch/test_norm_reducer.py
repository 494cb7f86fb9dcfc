"""The staging buffer: one copy up, one all-reduce, one copy down, one wait."""

from array import array

import pytest
import torch.distributed as dist

from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.platform.torch.failure import LocalFailure
from hyper_parallel.platform.torch.norm_reducer import Contribution, reduce_lanes
from hyper_parallel.platform.torch.reduction_groups import resolve_group
from hyper_parallel.platform.torch.staging_buffer import StagingBuffer
from hyper_parallel.platform.torch.wire_format import PartialNorm, Votes, WireFormat
from tests.ranks import run_ranks


@pytest.mark.simnpu
def test_staging_buffer_moves_once_each_way_and_waits_once():
    from hyper_parallel.testing import simnpu

    def rank_main(rank):
        group = resolve_group(None)
        staging = StagingBuffer(5, group.device)
        assert staging._host.is_pinned()
        pinned_before = simnpu.counters()
        sums = []
        for step in range(3):
            packed = array("f", [rank + step] * 5)
            reduced, cost = staging.reduce(packed, "sum", group.group)
            assert cost == Copies(h2d=1, collectives=1, d2h=1, host_syncs=1)
            sums.append(reduced.tolist())
        after = simnpu.counters()
        names = ("h2d", "h2d_async", "d2h", "d2h_async", "collectives", "host_syncs")
        counted = {name: after[name] - pinned_before.get(name, 0) for name in names}
        bytes_up = after["h2d_bytes"] - pinned_before["h2d_bytes"]
        assert after["early_rewrites"] == 0
        return sums, counted, bytes_up

    for sums, counted, bytes_up in run_ranks(rank_main, 4, backend="hccl"):
        assert sums == [[6.0 + 4 * step] * 5 for step in range(3)]
        assert set(counted.values()) == {3}
        assert bytes_up == 3 * 5 * 4


@pytest.mark.simnpu
def test_staging_buffer_is_right_however_slow_the_copies_are():
    """A buffer rewritten, or read, too early would show."""
    from hyper_parallel.testing import simnpu

    def rank_main(rank):
        simnpu.configure(copy_us=3000, collective_us=3000)
        staging = StagingBuffer(3, resolve_group(None).device)
        steps = range(4)
        return [
            staging.reduce(array("f", [rank + s] * 3), "max", dist.group.WORLD)[0].tolist()
            for s in steps
        ]

    for maxima in run_ranks(rank_main, 2, backend="hccl"):
        assert maxima == [[1.0 + step] * 3 for step in range(4)]


def test_on_a_group_that_reduces_cpu_tensors_nothing_is_copied():
    def rank_main(rank):
        group = resolve_group(None)
        staging = StagingBuffer(2, group.device)
        assert staging._host is staging._device
        reduced, cost = staging.reduce(array("f", [rank, 1.0]), "sum", group.group)
        assert cost == Copies(collectives=1)
        return reduced.tolist()

    assert run_ranks(rank_main, 3) == [[3.0, 3.0]] * 3


def test_lanes_are_read_by_the_ranks_of_their_set_only():
    def rank_main(rank):
        group = resolve_group(None)
        wire = WireFormat(group.size, 1.0)
        pair = (0, 1) if rank < 2 else (2, 3)
        partials = {(0, 1, 2, 3): PartialNorm(1.0), pair: PartialNorm(10.0 * rank)}
        reduced = reduce_lanes(
            group, Contribution(partials, Votes(), LocalFailure()), wire, stamp=5
        )
        return {s: total.grid_sum / 2**1074 for s, total in reduced.totals.items()}

    results = run_ranks(rank_main, 4)
    everyone = {(0, 1, 2, 3): 4.0}
    assert results[0] == results[1] == everyone | {(0, 1): 10.0}
    assert results[2] == results[3] == everyone | {(2, 3): 50.0}


def test_failed_collective_forgets_layout_and_buffer():
    def rank_main(rank):
        group = resolve_group(None)
        wire = WireFormat(group.size, 2.0)
        brought = Contribution({(0, 1): PartialNorm(1.0)}, Votes(), LocalFailure())
        reduce_lanes(group, brought, wire, stamp=5)
        assert group.layout is not None
        assert group.staging is not None
        if rank == 1:
            return None
        with pytest.raises(RuntimeError, match="rank 0: the reduction of the gradient norm failed"):
            reduce_lanes(group, brought, wire, stamp=5)
        return group.layout, group.staging

    assert run_ranks(rank_main, 2, group_timeout_s=2)[0] == (None, None)
