"""Partial norms of all ranks to lane totals: one copy up, one all-reduce, one copy down.

The only module that talks to a process group in every clip.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .agreement import agree
from .declarations import NOTHING_DECLARED, Declarations
from .device_packing import DeviceLanes, pack_on_device
from .failure import collectives_of
from .finish import may_overflow
from .meeting import meet
from .pending_sums import measure_pending
from .replica_spread import NO_SPREAD, ReplicaSpread, compare_replicas, warn_of_spread
from .staging_buffer import StagingBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .early_norms import EarlySums
    from .failure import LocalFailure
    from .finish import LaneTotal
    from .grad_shards import GradShard
    from .lanes import LaneKey, Layout, RankSet, Statement
    from .reduction_groups import ReductionGroup
    from .resident_norms import ResidentNorms
    from .wire_format import PartialNorm, Votes, WireFormat

__all__ = ["Contribution", "ReducedLanes", "extend_layout", "reduce_lanes"]


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
        early: Sums of gradients that were offloaded since, still on the group's device; None if it
            brings none such.
        resident: Norms of gradients that lie on that device; not together with `early`. The lanes
            of both are among `partials`, if need be with the identity.
    """

    partials: Mapping[LaneKey, PartialNorm]
    votes: Votes
    failure: LocalFailure
    pending: Sequence[GradShard] = ()
    reproducible: bool = False
    declared: Declarations = NOTHING_DECLARED
    families: Sequence[tuple[RankSet, ...]] = ()
    early: EarlySums | None = None
    resident: ResidentNorms | None = None

    @property
    def statement(self) -> Statement:
        """What it brings to an agreement."""
        return self.declared.statement(self.partials, is_complete=self.failure.error is None)


@dataclass(frozen=True)
class ReducedLanes:
    """What a rank reads after the reduce.

    Attributes:
        votes: The group's, or None if some rank asked for another clip than this one. If `frozen`,
            some rank did that joins no further collective.
        totals: One per rank set of the group's layout that contains this rank, or one of its pp
            group's.
        spread: How far the lanes of replicas are apart.
        early: The total of this rank's own early sums; None if it brought none.
        early_unsharded: Of those, the total of gradients that it holds whole.
    """

    votes: Votes | None
    totals: Mapping[RankSet, LaneTotal]
    spread: ReplicaSpread = NO_SPREAD
    early: LaneTotal | None = None
    early_unsharded: LaneTotal | None = None


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
        if reduced.votes is None or reduced.votes.error or reduced.votes.frozen:
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
    on_device: DeviceLanes | None = None
    if brought.early is not None and partials is not None:
        with brought.failure:
            on_device = pack_on_device(brought.early, partials, layout, wire, group.device)
    resident = brought.resident
    encoded = resident.for_layout(layout, wire, brought.failure) if resident else None
    votes = replace(
        brought.votes,
        error=brought.failure.error is not None,
        new_rank_set=call_kind is None or partials is None,
    )
    numel = wire.header_numel + len(layout.lane_of) * wire.lane_numel
    staging = _staging_of(
        group, numel, max(2 * wire.lane_numel, encoded.row_numel if encoded else 0)
    )
    if on_device is None:
        lanes = [(partials or {}).get(rank_set) for rank_set in layout.lane_of]
        packed = wire.pack(votes, stamp, lanes, call_kind or 0)
        buffer, cost = staging.reduce(packed, wire.op, group.group, encoded)
    else:
        packed_header = wire.pack_header(votes, stamp, call_kind or 0)
        buffer, cost = staging.sum_on_device(packed_header, on_device, group.group)
    group.copies += cost
    if resident and encoded:
        resident.arrive(buffer[numel:])
    header = wire.decode_header(buffer[: wire.header_numel].tolist(), stamp, call_kind or 0)
    if header is None or header.error or header.new_rank_set or header.frozen:
        # No lane is read: they are of different formats, or not all there, and then another
        # reduce follows, or an error.
        return ReducedLanes(header, totals={})
    rows = buffer[wire.header_numel : numel].view(-1, wire.lane_numel)
    totals = {
        rank_set: wire.decode(rows[layout.lane_of[rank_set]].tolist())
        for rank_set in layout.read_by(stages)
    }
    spread = compare_replicas(rows, layout, brought.families, wire)
    if on_device is None:
        return ReducedLanes(header, totals, spread)
    own = buffer[numel:].view(-1, wire.lane_numel)
    return ReducedLanes(header, totals, spread, *map(wire.decode, own.tolist()))


def _staging_of(group: ReductionGroup, numel: int, own_numel: int) -> StagingBuffer:
    """Return the group's buffer, made anew if it is of another size."""
    staging = group.staging
    if staging is None or staging.numel != numel or staging.own_numel < own_numel:
        staging = group.staging = StagingBuffer(numel, group.device, own_numel)
    return staging


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
