"""Partial norms of all ranks to lane totals: one copy up, one all-reduce, one copy down.

The only module that talks to a process group in every clip.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .agreement import agree
from .clip_result import Copies
from .declarations import NOTHING_DECLARED, Declarations
from .failure import collectives_of
from .finish import may_overflow
from .meeting import meet
from .pending_sums import measure_pending
from .replica_spread import NO_SPREAD, ReplicaSpread, compare_replicas, warn_of_spread

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from .failure import LocalFailure
    from .finish import LaneTotal
    from .grad_shards import GradShard
    from .lanes import LaneKey, Layout, RankSet, Statement
    from .reduction_groups import ReductionGroup
    from .resident_norms import EncodedNorms, ResidentNorms
    from .wire_format import PartialNorm, Votes, WireFormat

__all__ = ["Contribution", "ReducedLanes", "StagingBuffer", "extend_layout", "reduce_lanes"]


@dataclass(frozen=True)
class Contribution:
    """What a rank brings to a reduce.

    Attributes:
        partials: Its partial norm per lane; a lane of the layout may be missing.
        votes: Its votes; `error` and `new_rank_set` are filled in during the reduce.
        failure: What failed on it so far. It brings nothing else then, and the others learn of it.
        pending: Its Partial gradients. Their rank sets, and the ranks of their sums, are among
            `partials`, if need be with the identity.
        reproducible: Whether to sum the squares of those exactly.
        declared: What the user said of ranks and tensors.
        families: Rank sets whose lanes should hold the same norm.
        resident: Its norms that are still on the group's device. Their rank sets are among
            `partials`, if need be with the identity.
    """

    partials: Mapping[LaneKey, PartialNorm]
    votes: Votes
    failure: LocalFailure
    pending: Sequence[GradShard] = ()
    reproducible: bool = False
    declared: Declarations = NOTHING_DECLARED
    families: Sequence[tuple[RankSet, ...]] = ()
    resident: ResidentNorms | None = None

    @property
    def statement(self) -> Statement:
        """What it brings to an agreement."""
        return self.declared.statement(self.partials, is_complete=self.failure.error is None)


@dataclass(frozen=True)
class ReducedLanes:
    """What a rank reads after the reduce.

    Attributes:
        votes: The group's, or None if some rank asked for another clip than this one.
        totals: One per rank set of the group's layout that contains this rank, or one of its pp
            group's.
        spread: How far the lanes of replicas are apart.
    """

    votes: Votes | None
    totals: Mapping[RankSet, LaneTotal]
    spread: ReplicaSpread = NO_SPREAD


class StagingBuffer:
    """The host buffer that holds header and lanes, pinned, and its twin on the device.

    Where the group reduces CPU tensors the two are one, and nothing is copied. The host buffer is
    free to be rewritten whenever `reduce` has returned: the copy down is behind the copy up on the
    same stream, and has been waited for.

    Args:
        numel: Floats in the buffer.
        device: The group's.
        row_numel: Floats of norms on the device that come down behind them.
    """

    def __init__(self, numel: int, device: torch.device, row_numel: int = 0) -> None:
        self.numel = numel
        self.row_numel = row_numel
        self._on_host = device.type == "cpu"
        pin = not self._on_host
        # Not an inference tensor, which only inference mode could write again.
        with torch.inference_mode(mode=False):
            whole = numel + row_numel
            self._host = torch.empty(whole, dtype=torch.float32, device="cpu", pin_memory=pin)
            self._device = torch.empty_like(self._host, device=device) if pin else self._host
            # What came up, before norms on the device are added to it.
            self._arrived = torch.empty_like(self._device[:numel]) if row_numel else None

    def reduce(
        self,
        packed: array[float],
        op: str,
        group: dist.ProcessGroup,
        resident: EncodedNorms | None = None,
    ) -> torch.Tensor:
        """Reduce one rank's buffer over `group`; return the result, float32 on the host.

        [numel], and behind it the rows of `resident`, whose norms are added before the reduce.

        Sync: one event, unless the group reduces CPU tensors.
        """
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        packed_host, lanes = self._host[: self.numel], self._device[: self.numel]
        packed_host.copy_(torch.frombuffer(packed, dtype=torch.float32))
        if self._on_host:
            dist.all_reduce(lanes, op=reduce_op, group=group)
            return lanes
        down = self.numel + (resident.row_numel if resident else 0)
        module = torch.get_device_module(self._device.device)
        with module.device(self._device.device):  # whichever device is current for the caller
            if resident is None or self._arrived is None:
                lanes.copy_(packed_host, non_blocking=True)
            else:
                self._arrived.copy_(packed_host, non_blocking=True)
                resident.encode(self._arrived, lanes, self._device[self.numel : down])
            dist.all_reduce(lanes, op=reduce_op, group=group)
            self._host[:down].copy_(self._device[:down], non_blocking=True)
            arrived = module.Event()
            arrived.record()
            arrived.synchronize()
        return self._host[:down]

    @property
    def copies(self) -> Copies:
        """What one `reduce` costs."""
        moves = 0 if self._on_host else 1
        return Copies(h2d=moves, collectives=1, d2h=moves, host_syncs=moves)


def extend_layout(group: ReductionGroup, statement: Statement) -> Layout:
    """Agree on a layout that has the lanes of all statements; the first time, meet before.

    Args:
        group: The group.
        statement: What this rank holds.

    Ranks: all of the group.

    Raises:
        ValueError: On every rank, if a rank set or pp group has members outside the group, or ranks
            disagree on one.
        RuntimeError: If a rank does not come, or a collective fails.
    """
    with collectives_of(group):
        return _extend_layout(group, statement)


def _extend_layout(group: ReductionGroup, statement: Statement) -> Layout:
    if group.layout is None:
        meet(group)
    return agree(group, statement)


def reduce_lanes(
    group: ReductionGroup, brought: Contribution, wire: WireFormat, stamp: int
) -> ReducedLanes:
    """Reduce every rank's partial norms over the group.

    One all-reduce, after the group's first. More only if its header says so: some rank met a new
    rank set or pp group, a float64 gradient is about under MAX, or a gradient is Partial.

    Args:
        group: The group; its layout is agreed here the first time.
        brought: What this rank brings. What fails while it measures sums of Partial gradients is
            kept in its `failure`.
        wire: The format, for the group's size.
        stamp: `wire_format.fingerprint` of what all ranks must have asked for alike.

    Ranks: all of the group.

    Raises:
        ValueError: On every rank, if a rank set or pp group has members outside the group, or ranks
            disagree on one, or on a Partial gradient.
        RuntimeError: If a collective fails.
    """
    with collectives_of(group):
        layout = group.layout or _extend_layout(group, brought.statement)
        reduced = _reduce_once(group, layout, brought, wire, stamp)
        # Every branch here hangs on the header, which is the same on all ranks.
        if reduced.votes is None or reduced.votes.error:
            return reduced
        if reduced.votes.new_rank_set:
            layout = _extend_layout(group, brought.statement)
            reduced = _reduce_once(group, layout, brought, wire, stamp)
            if reduced.votes and reduced.votes.new_rank_set and not reduced.votes.error:
                raise RuntimeError("the ranks have agreed on a layout, and do not all know it")
        if reduced.votes and reduced.votes.partial_gradient and not reduced.votes.error:
            brought = _add_up_pending(group, layout, brought, wire)
            reduced = _reduce_once(group, layout, brought, wire, stamp)
        votes = reduced.votes
        if votes and votes.float64_gradient and not votes.error and wire.op == "max":
            reduced = _refine_extrema(group, layout, brought, reduced, wire)
    warn_of_spread(group, reduced.spread)
    return reduced


def _reduce_once(
    group: ReductionGroup, layout: Layout, brought: Contribution, wire: WireFormat, stamp: int
) -> ReducedLanes:
    """Steps 3 and 4 of a clip: pack, move, reduce, read the header and the own lanes."""
    stages = brought.declared.stages
    call_kind = layout.number_of(stages)
    partials = _place(brought.partials, layout, wire)
    votes = replace(
        brought.votes,
        error=brought.failure.error is not None,
        new_rank_set=call_kind is None or partials is None,
    )
    lanes = [(partials or {}).get(rank_set) for rank_set in layout.lane_of]
    packed = wire.pack(votes, stamp, lanes, call_kind or 0)
    resident = brought.resident
    encoded = resident.for_layout(layout, wire) if resident else None
    buffer = _move_and_reduce(group, packed, wire, encoded)
    if resident:
        resident.arrive(buffer[len(packed) :])
    header = wire.decode_header(buffer[: wire.header_numel].tolist(), stamp, call_kind or 0)
    if header is None or header.error or header.new_rank_set:
        # No lane is read: they are of different formats, or not all there, and then another
        # reduce follows, or an error.
        return ReducedLanes(header, totals={})
    rows = buffer[wire.header_numel : len(packed)].view(-1, wire.lane_numel)
    totals = {
        rank_set: wire.decode(rows[layout.lane_of[rank_set]].tolist())
        for rank_set in layout.read_by(stages)
    }
    return ReducedLanes(header, totals, compare_replicas(rows, layout, brought.families, wire))


def _move_and_reduce(
    group: ReductionGroup, packed: array[float], wire: WireFormat, resident: EncodedNorms | None
) -> torch.Tensor:
    """Reduce in the group's buffer, made anew if it is of another size; count what it costs."""
    row_numel = resident.row_numel if resident else 0
    staging = group.staging
    if staging is None or staging.numel != len(packed) or staging.row_numel < row_numel:
        staging = group.staging = StagingBuffer(len(packed), group.device, row_numel)
    buffer = staging.reduce(packed, wire.op, group.group, resident)
    group.copies += staging.copies
    return buffer


def _place(
    partials: Mapping[LaneKey, PartialNorm], layout: Layout, wire: WireFormat
) -> dict[LaneKey, PartialNorm] | None:
    """Return the partial norm per rank set; None if one of them has no lane yet."""
    placed: dict[LaneKey, PartialNorm] = {}
    for key, partial in partials.items():
        rank_set = layout.rank_set_of(key)
        if rank_set is None:
            return None
        known = placed.get(rank_set)
        placed[rank_set] = partial if known is None else wire.combine([known, partial])
    return placed


def _add_up_pending(
    group: ReductionGroup, layout: Layout, brought: Contribution, wire: WireFormat
) -> Contribution:
    """Return the contribution with this rank's slices of all Partial gradients' sums."""
    slices = measure_pending(
        group,
        layout,
        brought.pending,
        wire.norm_type,
        brought.failure,
        reproducible=brought.reproducible,
    )
    partials = _place(brought.partials, layout, wire) or {}
    for rank_set, measured in slices.items():
        known = [partials[rank_set]] if rank_set in partials else []
        partials[rank_set] = wire.combine([*known, *measured])
    total = wire.to_total(wire.combine(partials.values()))
    votes = replace(
        brought.votes,
        nonfinite=brought.votes.nonfinite or any(p.is_nonfinite for p in partials.values()),
        huge=brought.votes.huge or may_overflow(total, wire.norm_type, group.size),
    )
    return replace(brought, partials=partials, votes=votes)


def _refine_extrema(
    group: ReductionGroup,
    layout: Layout,
    brought: Contribution,
    reduced: ReducedLanes,
    wire: WireFormat,
) -> ReducedLanes:
    """Replace extrema that float32 lanes rounded by exact ones: a float64 gradient is about.

    The bit patterns of non-negative float64 numbers are ordered as the numbers are.
    """
    identity = wire.combine([])
    known = brought.partials
    if brought.resident:
        known = brought.resident.combine_with(known, wire)
    partials = _place(known, layout, wire) or {}
    values = [partials.get(rank_set, identity).value for rank_set in layout.lane_of]
    rows = group.gather_ints([_bit_pattern(value) for value in values])
    pick = max if wire.norm_type > 0 else min
    totals = {}
    for rank_set, total in reduced.totals.items():
        pattern = pick(row[layout.lane_of[rank_set]] for row in rows)
        exact = struct.unpack("<d", struct.pack("<q", pattern))[0]
        totals[rank_set] = replace(total, extremum=exact)
    return replace(reduced, totals=totals)


def _bit_pattern(value: float) -> int:
    pattern: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return pattern
