"""How far the norms of replicas are apart, from the lanes that a clip has reduced anyway.

Where the mesh of a DTensor has replicated dims, the lanes of all copies should hold the same norm:
a difference means a gradient that was not synchronised, or memory that was corrupted. Only lanes in
which a rank has nothing else are compared: pipeline stages may share a lane with a copy.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .finish import GRID_EXPONENT
from .lanes import describe_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .lanes import LaneKey, Layout, RankSet
    from .reach import Reach
    from .reduction_groups import ReductionGroup
    from .wire_format import WireFormat

__all__ = ["NO_SPREAD", "ReplicaSpread", "compare_replicas", "families_of", "warn_of_spread"]

_WORTH_A_WARNING = 1e-3
_logger = logging.getLogger("hyper_parallel")


@dataclass(frozen=True)
class ReplicaSpread:
    """The pair of replicas that are farthest apart.

    Attributes:
        relative: (larger - smaller) / larger of their norms; inf if elements of one only are NaN or
            infinite.
        ranks: Rank sets of the larger and the smaller.
        norms: Their norms.
    """

    relative: float = 0.0
    ranks: tuple[RankSet, RankSet] = ((), ())
    norms: tuple[float, float] = (0.0, 0.0)


NO_SPREAD = ReplicaSpread()


def families_of(reaches: Iterable[Reach]) -> list[tuple[RankSet, ...]]:
    """Return the rank sets whose lanes should hold the same norm, a tuple for each such family.

    Without those whose lane this rank shares with gradients that have no copies, or others.
    """
    by_rank_set: dict[LaneKey, set[tuple[RankSet, ...]]] = {}
    for reach in reaches:
        by_rank_set.setdefault(reach.rank_set, set()).add(reach.siblings)
    return [
        family for found in by_rank_set.values() if len(found) == 1 for family in found if family
    ]


def compare_replicas(
    lanes: torch.Tensor,
    layout: Layout,
    families: Iterable[tuple[RankSet, ...]],
    wire: WireFormat,
) -> ReplicaSpread:
    """Return the largest spread among the replicas of a rank's gradients.

    A replica without a gradient counts as one with zeros, if it has a lane: an optimizer step would
    part it from the others.

    Args:
        lanes: [lanes, floats per lane] float32 on the CPU, reduced.
        layout: What they are.
        families: See `families_of`.
        wire: Their format.
    """
    spreads = [
        _spread_of(lanes, {s: layout.lane_of[s] for s in family if s in layout.lane_of}, wire)
        for family in families
    ]
    return max(spreads, key=lambda spread: spread.relative, default=NO_SPREAD)


def warn_of_spread(group: ReductionGroup, spread: ReplicaSpread) -> None:
    """Log one warning in the life of the group, from the lowest rank of the larger norm.

    The ranks of the smaller one may have no gradient, and nothing to compare.

    Not a Python warning, which a filter may turn into an exception, and that on one rank alone.
    """
    if spread.relative <= _WORTH_A_WARNING or group.warned_of_spread:
        return
    group.warned_of_spread = True
    if group.rank == min(spread.ranks[0]):
        larger, smaller = map(describe_ranks, spread.ranks)
        _logger.warning(
            "rank %d: gradients that should be the same on all replicas have a norm of %.9g on "
            "ranks %s and of %.9g on ranks %s: one was not synchronised, is missing or corrupted",
            group.rank,
            spread.norms[0],
            larger,
            spread.norms[1],
            smaller,
        )


def _spread_of(
    lanes: torch.Tensor, lane_of: Mapping[RankSet, int], wire: WireFormat
) -> ReplicaSpread:
    if len(lane_of) < 2:
        return NO_SPREAD
    rank_sets = list(lane_of)
    rows = lanes[list(lane_of.values())]
    if bool((rows == rows[0]).all()):  # the usual case: replicas are equal in every bit
        return NO_SPREAD
    values = _values(rows, wire)
    broken = (rows[:, :2] > 0).any(1)
    if bool(broken.all()):
        return NO_SPREAD
    if bool(broken.any()):
        worst, sound = int(broken.nonzero()[0]), int((~broken).nonzero()[0])
        norms = (math.nan, _norm(values[sound].item(), wire))
        return ReplicaSpread(math.inf, (rank_sets[worst], rank_sets[sound]), norms)
    largest, smallest = int(values.argmax()), int(values.argmin())
    high, low = values[largest].item(), values[smallest].item()
    ratio = 1.0 if high == low else 0.0 if math.isinf(high) else low / high
    relative = 1.0 - _norm(ratio, wire)
    return ReplicaSpread(
        relative,
        (rank_sets[largest], rank_sets[smallest]),
        (_norm(high, wire), _norm(low, wire)),
    )


def _values(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Return sums of powers, or extrema, in float64: near enough to be compared."""
    if wire.op == "max":
        return rows[:, 2].double().abs()
    weights = [
        math.ldexp(1.0, i * wire.digit_bits + GRID_EXPONENT) for i in range(wire.lane_numel - 2)
    ]
    return rows[:, 2:].double() @ torch.tensor(weights, dtype=torch.float64, device="cpu")


def _norm(value: float, wire: WireFormat) -> float:
    if wire.op == "max" or wire.norm_type == 0.0:
        return value
    try:
        return math.pow(value, 1.0 / wire.norm_type)
    except OverflowError:
        return math.inf
