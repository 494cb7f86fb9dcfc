"""Partial norms of all ranks to lane totals: one copy up, one all-reduce, one copy down.

The only module that talks to a process group in every clip.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .agreement import agree
from .clip_result import Copies
from .declarations import NOTHING_DECLARED, Declarations
from .device_packing import DeviceLanes, pack_on_device
from .failure import collectives_of
from .finish import NOTHING, may_overflow
from .meeting import meet
from .pending_sums import measure_pending
from .replica_spread import NO_SPREAD, ReplicaSpread, compare_replicas, warn_of_spread
from .wire_format import VOTE_PLACES

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from .early_norms import EarlySums
    from .failure import LocalFailure
    from .finish import LaneTotal
    from .grad_shards import GradShard
    from .lanes import LaneKey, Layout, RankSet, Statement
    from .reduction_groups import ReductionGroup
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
        early: Sums that are still on the group's device; None if it brings none such. Their lanes
            are among `partials`, too.
    """

    partials: Mapping[LaneKey, PartialNorm]
    votes: Votes
    failure: LocalFailure
    pending: Sequence[GradShard] = ()
    reproducible: bool = False
    declared: Declarations = NOTHING_DECLARED
    families: Sequence[tuple[RankSet, ...]] = ()
    early: EarlySums | None = None

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
        early: The total of this rank's own early sums.
        early_unsharded: Of those, the total of gradients that it holds whole.
    """

    votes: Votes | None
    totals: Mapping[RankSet, LaneTotal]
    spread: ReplicaSpread = NO_SPREAD
    early: LaneTotal = NOTHING
    early_unsharded: LaneTotal = NOTHING


class StagingBuffer:
    """The host buffer that holds header and lanes, pinned, and its twin on the device.

    Where the group reduces CPU tensors the two are one, and nothing is copied. The host buffer is
    free to be rewritten whenever `reduce` has returned: the copy down is behind the copy up on the
    same stream, and has been waited for.

    Args:
        numel: Floats in the buffer that are reduced.
        own_numel: Floats behind them that are not, but go down with them.
        device: The group's.

    Attributes:
        numel: As passed.
    """

    def __init__(self, numel: int, own_numel: int, device: torch.device) -> None:
        self.numel = numel
        self._on_host = device.type == "cpu"
        pin = not self._on_host
        # Not an inference tensor, which only inference mode could write again.
        with torch.inference_mode(mode=False):
            self._host = torch.empty(
                numel + own_numel, dtype=torch.float32, device="cpu", pin_memory=pin
            )
            self._device = torch.empty_like(self._host, device=device) if pin else self._host
            # The last header that was packed on the device, there and as the host knows it.
            self._header = torch.empty_like(self._device)
        self._header_values: list[float] = []

    def reduce(
        self, packed: array[float], op: str, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, Copies]:
        """Reduce one rank's buffer over `group`.

        Returns:
            The result, [numel] float32 on the host, and what it cost.

        Sync: one event, unless the group reduces CPU tensors.
        """
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        host = self._host[: self.numel]
        host.copy_(torch.frombuffer(packed, dtype=torch.float32))
        if self._on_host:
            dist.all_reduce(host, op=reduce_op, group=group)
            return host, Copies(collectives=1)
        module = torch.get_device_module(self._device.device)
        with module.device(self._device.device):  # whichever device is current for the caller
            device = self._device[: self.numel]
            device.copy_(host, non_blocking=True)
            dist.all_reduce(device, op=reduce_op, group=group)
            self._bring_down(self.numel)
        return host, Copies(h2d=1, collectives=1, d2h=1, host_syncs=1)

    def sum_on_device(
        self, header: list[float], packed: DeviceLanes, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, Copies]:
        """Sum one rank's buffer, packed on the device, over `group`.

        Returns:
            The result and this rank's own lanes, [numel + own_numel] float32 on the host, and what
            it cost.

        Sync: one event.
        """
        with torch.get_device_module(self._device.device).device(self._device.device):
            self._fill_header(header)
            start = len(header)
            self._device[:start].copy_(self._header[:start])
            for name, vote in packed.votes.items():
                self._device[VOTE_PLACES[name]].add_(vote)
            self._device[start : self.numel].copy_(packed.lanes.flatten())
            self._device[self.numel :].copy_(packed.own.flatten())
            dist.all_reduce(self._device[: self.numel], group=group)
            self._bring_down(self._host.numel())
        return self._host, Copies(collectives=1, d2h=1, host_syncs=1)

    def _fill_header(self, header: list[float]) -> None:
        """Change what is new in the header; numbers are arguments of the kernels."""
        if len(self._header_values) != len(header):
            self._header_values = [math.nan] * len(header)
        for i, (old, new) in enumerate(zip(self._header_values, header, strict=True)):
            if old != new:
                self._header[i].fill_(new)
        self._header_values = header

    def _bring_down(self, numel: int) -> None:
        self._host[:numel].copy_(self._device[:numel], non_blocking=True)
        arrived = torch.get_device_module(self._device.device).Event()
        arrived.record()
        arrived.synchronize()


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
    on_device: DeviceLanes | None = None
    if brought.early is not None and partials is not None:
        with brought.failure:
            on_device = pack_on_device(brought.early, partials, layout, wire, group.device)
    votes = replace(
        brought.votes,
        error=brought.failure.error is not None,
        new_rank_set=call_kind is None or partials is None,
    )
    numel = wire.header_numel + len(layout.lane_of) * wire.lane_numel
    if group.staging is None or group.staging.numel != numel:
        group.staging = StagingBuffer(numel, 2 * wire.lane_numel, group.device)
    if on_device is None:
        lanes = [(partials or {}).get(rank_set) for rank_set in layout.lane_of]
        packed = wire.pack(votes, stamp, lanes, call_kind or 0)
        buffer, cost = group.staging.reduce(packed, wire.op, group.group)
    else:
        packed_header = wire.pack_header(votes, stamp, call_kind or 0)
        buffer, cost = group.staging.sum_on_device(packed_header, on_device, group.group)
    group.copies += cost
    header = wire.decode_header(buffer[: wire.header_numel].tolist(), stamp, call_kind or 0)
    if header is None or header.error or header.new_rank_set:
        # No lane is read: they are of different formats, or not all there, and then another
        # reduce follows, or an error.
        return ReducedLanes(header, totals={})
    rows = buffer[wire.header_numel :].view(-1, wire.lane_numel)
    totals = {
        rank_set: wire.decode(rows[layout.lane_of[rank_set]].tolist())
        for rank_set in layout.read_by(stages)
    }
    spread = compare_replicas(rows, layout, brought.families, wire)
    if on_device is None:
        return ReducedLanes(header, totals, spread)
    return ReducedLanes(header, totals, spread, *map(wire.decode, rows[-2:].tolist()))


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
    partials = _place(brought.partials, layout, wire) or {}
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
