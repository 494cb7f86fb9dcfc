"""What one rank knows of its gradients before the reduce."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .clip_request import NOTHING_ASKED, ClipRequest
from .clip_result import Copies, NonfiniteGradient
from .failure import LocalFailure
from .finish import may_overflow
from .grad_shards import GradShards
from .parameter_list import ParameterList
from .partial_norms import measure
from .wire_format import PartialNorms, Votes

if TYPE_CHECKING:
    from .lanes import RankSet
    from .wire_format import PartialNorm, WireFormat

__all__ = ["LocalNorms"]

_WIDE = frozenset((torch.float64, torch.complex128))


@dataclass
class LocalNorms:
    """What was asked, listed and measured; nothing, or some of it, if this rank failed on the way.

    Attributes:
        request: What the clip was asked to do.
        listed: Its parameters.
        shards: Their gradients.
        measured: Partial norms of `shards.whole`.
        fetched: What fetching those from devices cost.
    """

    request: ClipRequest = NOTHING_ASKED
    listed: ParameterList = field(default_factory=lambda: ParameterList([]))
    shards: GradShards = field(default_factory=lambda: GradShards([], [], []))
    measured: PartialNorms = field(default_factory=lambda: PartialNorms([]))
    fetched: Copies = field(default_factory=Copies)

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

    def by_rank_set(self, wire: WireFormat) -> dict[RankSet, PartialNorm]:
        """Return one partial norm per rank set; the identity where gradients wait for their sum."""
        combined = {}
        if self.measured:
            for rank_set, indices in self.shards.whole.indices_by_rank_set().items():
                combined[rank_set] = wire.combine(self.measured.select(indices))
        for shard in self.shards.pending:
            assert shard.pending is not None  # noqa: S101
            combined.setdefault(shard.rank_set, wire.combine([]))
            combined.setdefault(shard.pending.ranks, wire.combine([]))
        return combined

    def votes(self, wire: WireFormat) -> Votes:
        """Return this rank's answers to what all ranks decide together."""
        total = wire.to_total(wire.combine(self.measured))
        return Votes(
            huge=may_overflow(total, wire.norm_type, wire.group_size),
            nonfinite=any(partial.is_nonfinite for partial in self.measured.others.values()),
            float64_gradient=not _WIDE.isdisjoint(self.shards.dtypes),
            partial_gradient=bool(self.shards.pending),
        )
