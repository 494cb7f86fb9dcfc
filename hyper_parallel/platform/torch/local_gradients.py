"""What one rank knows of its gradients before the reduce."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .clip_request import NOTHING_ASKED, ClipRequest
from .clip_result import Copies, NonfiniteGradient
from .declarations import NOTHING_DECLARED, Declarations
from .early_norms import EarlySums, none_for
from .early_norms import find as find_early_norms
from .failure import LocalFailure
from .finish import LaneTotal, may_overflow, sum_totals
from .grad_shards import WIDE_DTYPES, GradShards
from .lanes import UNCOUNTED, LaneKey
from .parameter_list import ParameterList
from .partial_norms import measure
from .resident_norms import ResidentNorms
from .wire_format import PartialNorm, PartialNorms, Votes, WireFormat

if TYPE_CHECKING:
    from .reduction_groups import ReductionGroup

__all__ = ["LocalGradients"]


@dataclass
class LocalGradients:
    """Request, shards and partial norms; nothing, or some of it, if it failed on the way.

    Attributes:
        request: What the clip was asked to do.
        declared: What the user said of ranks and tensors.
        listed: The parameters.
        shards: Their gradients.
        early: Partial norms of some of `shards.whole` that were taken before the clip.
        early_stay: Whether they stay on the device for the reduce.
        fetched_early: Else what they are, per lane.
        resident: Partial norms of those of `remaining` that lie on the group's device.
        measured: Partial norms of `remaining`.
        fetched: What fetching partial norms from devices cost.
        host_bytes_read: Bytes of gradients in host memory that were passed over.
    """

    request: ClipRequest = NOTHING_ASKED
    declared: Declarations = NOTHING_DECLARED
    listed: ParameterList = field(default_factory=lambda: ParameterList([]))
    shards: GradShards = field(default_factory=lambda: GradShards([], [], []))
    early: EarlySums = field(default_factory=EarlySums)
    early_stay: bool = False
    fetched_early: dict[LaneKey, PartialNorm] = field(default_factory=dict)
    resident: ResidentNorms | None = None
    measured: PartialNorms = field(default_factory=lambda: PartialNorms([]))
    fetched: Copies = field(default_factory=Copies)
    host_bytes_read: int = 0

    @functools.cached_property
    def remaining(self) -> GradShards:
        """Shards of `shards.whole` without an early norm that holds."""
        whole, early = self.shards.whole, set(self.early.indices)
        return whole.select(i for i in range(len(whole)) if i not in early) if early else whole

    def measure(self, group: ReductionGroup | None) -> None:
        """Look for norms taken before the clip, and pass over the shards that have none.

        What lies on the group's device is launched only. A rank that has both kinds on the device
        brings the early ones down first.

        Args:
            group: Over whose device they are reduced.
        """
        request = self.request
        if request.norm_type != 2.0:
            self.early = none_for(self.shards.whole, "is measured with another norm_type than 2")
        elif request.reproducible:
            self.early = none_for(self.shards.whole, "is measured reproducibly")
        else:
            self.early = find_early_norms(self.shards.whole)
        if not request.reproducible:
            self.resident = ResidentNorms.launch(self.remaining, request.norm_type, group)
        self.early_stay = bool(self.early.indices) and self._reduces_where_they_are(group)
        if not self.early_stay:
            wire = WireFormat(group.size if group else 1, request.norm_type)
            self.fetched_early = self.early.fetch(wire)
        here = self.resident.others if self.resident else self.remaining
        self.measured, copies = measure(
            here.tensors,
            request.norm_type,
            reproducible=request.reproducible,
            are_plain=here.are_plain,
        )
        if self.resident:
            self.measured = self.resident.merge(self.measured)
        self.fetched = copies + self.early.copies
        self.host_bytes_read = here.host_bytes

    def _reduces_where_they_are(self, group: ReductionGroup | None) -> bool:
        if group is None or group.device.type == "cpu" or self.resident is not None:
            return False
        return self.early.device in (None, group.device)

    def take_residents(self) -> None:
        """Fill in the partial norms that came down with the lanes.

        Not where the host pass failed, which this rank has yet to raise with the others.
        """
        if self.resident and self.measured:
            self.measured = self.resident.merge(self.measured.select(self.resident.other_indices))
            self.fetched += self.resident.copies

    @functools.cached_property
    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """Shards that make the norm NaN or infinite.

        Partial ones, and those measured early, are looked at here and now.
        """
        unknown = [self.shards.pending]
        if self.early.indices:
            unknown.append(self.shards.whole.select(self.early.indices))
        looked_at = [(self.remaining, self.measured)]
        with LocalFailure():  # only names are at stake, for which other ranks may be waiting
            for shards in unknown:
                partials, copies = measure(shards.tensors, self.request.norm_type)
                self.fetched += copies
                self.host_bytes_read += shards.host_bytes
                looked_at.append((shards, partials))
        return tuple(
            NonfiniteGradient(
                self.listed.describe(shards.positions[i]), partial.num_nan, partial.num_inf
            )
            for shards, partials in looked_at
            for i, partial in partials.others.items()
            if partial.is_nonfinite
        )

    def combine_by_lane(self, wire: WireFormat) -> dict[LaneKey, PartialNorm]:
        """Return what the host knows, one partial norm per lane.

        The identity where gradients wait for their sum, or their early sums for the reduce.
        """
        combined: dict[LaneKey, PartialNorm] = {}
        if self.measured:
            for key, indices in self.remaining.indices_by_rank_set().items():
                combined[key] = wire.combine(self.measured.select(indices))
        for key, partial in self.fetched_early.items():
            known = [combined[key]] if key in combined else []
            combined[key] = wire.combine([partial, *known])
        waiting: set[LaneKey] = set(self.early.sums)
        for shard in self.shards.pending:
            assert shard.pending is not None  # noqa: S101
            waiting |= {shard.rank_set, shard.pending.ranks}
        combined = {key: wire.combine([]) for key in waiting} | combined
        combined.pop(UNCOUNTED, None)
        return combined

    def own_total(self, wire: WireFormat) -> LaneTotal:
        """Return the total of what the host knows of this rank's shards."""
        parts = [wire.combine(self.measured), *self.fetched_early.values()]
        return sum_totals(map(wire.to_total, parts), wire.norm_type)

    def votes(self, wire: WireFormat) -> Votes:
        """Return this rank's answers to what all ranks decide together.

        Where there are early sums, which only the device knows, it adds its own votes.
        """
        # Two halves that are not huge together make a whole that is not (device_packing).
        share = 2 if self.early_stay else 1
        partials = [*self.measured.others.values(), *self.fetched_early.values()]
        return Votes(
            huge=may_overflow(self.own_total(wire), wire.norm_type, share * wire.group_size),
            nonfinite=any(partial.is_nonfinite for partial in partials),
            float64_gradient=not WIDE_DTYPES.isdisjoint(self.shards.dtypes),
            partial_gradient=bool(self.shards.pending),
        )
