"""What one rank knows of its gradients before the reduce."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .clip_request import NOTHING_ASKED, ClipRequest
from .clip_result import Copies, NonfiniteGradient
from .declarations import NOTHING_DECLARED, Declarations
from .failure import LocalFailure
from .finish import may_overflow
from .grad_shards import GradShards
from .lanes import UNCOUNTED, LaneKey
from .parameter_list import ParameterList
from .partial_norms import measure
from .resident_norms import ResidentNorms
from .wire_format import PartialNorm, PartialNorms, Votes, WireFormat

if TYPE_CHECKING:
    from .reduction_groups import ReductionGroup

__all__ = ["LocalGradients"]

_WIDE = frozenset((torch.float64, torch.complex128))


@dataclass
class LocalGradients:
    """Request, shards and partial norms; nothing, or some of it, if it failed on the way."""

    request: ClipRequest = NOTHING_ASKED
    declared: Declarations = NOTHING_DECLARED
    listed: ParameterList = field(default_factory=lambda: ParameterList([]))
    shards: GradShards = field(default_factory=lambda: GradShards([], [], []))
    resident: ResidentNorms | None = None
    measured: PartialNorms = field(default_factory=lambda: PartialNorms([]))
    fetched: Copies = field(default_factory=Copies)

    def measure(self, group: ReductionGroup | None, *, use_kernels: bool) -> None:
        """Measure what is not Partial; what lies on the group's device is launched only."""
        shards, request = self.shards.whole, self.request
        if use_kernels and not request.reproducible:
            self.resident = ResidentNorms.launch(shards, request.norm_type, group)
        here = self.resident.others if self.resident else shards
        self.measured, self.fetched = measure(
            here.tensors,
            request.norm_type,
            reproducible=request.reproducible,
            are_plain=shards.are_plain,
        )
        if self.resident:
            self.measured = self.resident.merge(self.measured)

    def take_residents(self) -> None:
        """Fill in the partial norms that came down with the lanes."""
        if self.resident:
            self.measured = self.resident.merge(self.measured.select(self.resident.other_indices))
            self.fetched += self.resident.copies

    @functools.cached_property
    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """Shards that make the norm NaN or infinite. Partial ones are looked at here and now."""
        addends = PartialNorms([])
        with LocalFailure():  # only names are at stake, for which other ranks may be waiting
            addends, fetched = measure(self.shards.pending.tensors, self.request.norm_type)
            self.fetched += fetched
        return tuple(
            NonfiniteGradient(
                self.listed.describe(shards.positions[i]), partial.num_nan, partial.num_inf
            )
            for shards, partials in (
                (self.shards.whole, self.measured),
                (self.shards.pending, addends),
            )
            for i, partial in partials.others.items()
            if partial.is_nonfinite
        )

    def combine_by_lane(self, wire: WireFormat) -> dict[LaneKey, PartialNorm]:
        """Return one partial norm per lane; the identity where gradients wait for their sum."""
        combined = {}
        if self.measured:
            for key, indices in self.shards.whole.indices_by_rank_set().items():
                combined[key] = wire.combine(self.measured.select(indices))
        combined.pop(UNCOUNTED, None)
        for shard in self.shards.pending:
            assert shard.pending is not None  # noqa: S101
            combined.setdefault(shard.rank_set, wire.combine([]))
            combined.setdefault(shard.pending.ranks, wire.combine([]))
        return combined

    def votes(self, wire: WireFormat) -> Votes:
        """Return what this rank answers in the header."""
        total = wire.to_total(wire.combine(self.measured))
        return Votes(
            huge=may_overflow(total, wire.norm_type, wire.group_size),
            nonfinite=any(partial.is_nonfinite for partial in self.measured.others.values()),
            float64_gradient=not _WIDE.isdisjoint(self.shards.dtypes),
            partial_gradient=bool(self.shards.pending),
        )
