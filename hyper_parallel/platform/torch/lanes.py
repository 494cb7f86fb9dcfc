"""Rank sets to a layout: the ordered lanes that all ranks of a group agree on.

A rank set is the sorted tuple of the global ranks whose partial norms of a gradient shard belong
together. Ranks know only their own; before the first reduce over a group, and again when a rank
meets a new one, all of them exchange what they know and build the same sorted layout. Layouts
belong to the group, not to who asks, and only grow.

Two things beside rank sets are agreed on with them (`statements`): who are the pipeline stages,
and the union of the rank sets that the ranks of a `sharded_over` group have for one tensor.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .wire_format import NUM_CALL_KINDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "UNCOUNTED",
    "UNSHARDED",
    "LaneKey",
    "Layout",
    "RankSet",
    "ShardUnion",
    "Statement",
    "build_layout",
    "describe_ranks",
    "stable_hash",
]

RankSet = tuple[int, ...]
UNSHARDED: RankSet = ()
"""The rank set of gradients that this rank holds whole. It has no lane."""
UNCOUNTED: RankSet = (-1,)
"""Stands for the rank set of a copy that another rank counts. It has no lane."""

_MOST_PIPELINES = NUM_CALL_KINDS - 1  # less the call without any


class ShardUnion(NamedTuple):
    """The rank set of a tensor that is sharded over a group beside what its DTensor says.

    It is the union of the rank sets that the DTensors of that tensor have on the group's ranks, of
    which a rank knows only its own: the agreement resolves it.

    Attributes:
        base: The rank set from this rank's DTensor.
        over: The group's ranks.
        kind: 63 bits of the mesh's shape and sharded dims, by which the ranks find each other's.
    """

    base: RankSet
    over: RankSet
    kind: int


LaneKey = RankSet | ShardUnion
"""What a rank knows of the lane of a gradient shard before the agreement."""


@dataclass(frozen=True)
class Statement:
    """What one rank brings to an agreement.

    Attributes:
        lanes: What it holds.
        stages: The ranks of its `pp_group`; None if it was given none.
        is_complete: Whether it came to know all of that; not so on a rank that failed before.
    """

    lanes: Collection[LaneKey] = ()
    stages: RankSet | None = None
    is_complete: bool = True


@dataclass(frozen=True)
class Layout:
    """The lanes of one group, in an order that is the same on all its ranks.

    Attributes:
        lane_of: The number of each rank set's lane; in the order of the lanes.
        own_rank_sets: Those that contain this rank.
        unions: What was agreed on of tensors declared as sharded.
        pipelines: The partitions of the group into pp groups that were agreed on, latest last.
    """

    lane_of: Mapping[RankSet, int]
    own_rank_sets: tuple[RankSet, ...]
    unions: Mapping[ShardUnion, RankSet] = field(default_factory=dict)
    pipelines: tuple[frozenset[RankSet], ...] = ()

    def rank_set_of(self, key: LaneKey) -> RankSet | None:
        """Return the rank set whose lane a shard belongs to, if it has been agreed on."""
        rank_set = self.unions.get(key) if isinstance(key, ShardUnion) else key
        return rank_set if rank_set in self.lane_of else None

    def read_by(self, stages: RankSet | None) -> tuple[RankSet, ...]:
        """Return the rank sets whose lanes this rank adds up: its own and its pp peers', once."""
        if stages is None or len(stages) == 1:
            return self.own_rank_sets
        return self._read_by_stages[stages]

    @functools.cached_property
    def _read_by_stages(self) -> Mapping[RankSet, tuple[RankSet, ...]]:
        return _ReadByStages(self.lane_of)

    def number_of(self, stages: RankSet | None) -> int | None:
        """Return which kind of call this is: 0 without a pp group, else which of the pipelines.

        None if the stages have not been agreed on. The latest pipeline that has them counts: if
        another rank means another one, all see that the numbers differ, and agree anew.
        """
        if stages is None:
            return 0
        found = [i for i, pipeline in enumerate(self.pipelines, 1) if stages in pipeline]
        return found[-1] if found else None


class _ReadByStages(dict[RankSet, tuple[RankSet, ...]]):
    """Rank sets that contain any rank of a pp group, found when they are first asked for."""

    def __init__(self, rank_sets: Iterable[RankSet]) -> None:
        super().__init__()
        self._rank_sets = tuple(rank_sets)

    def __missing__(self, stages: RankSet) -> tuple[RankSet, ...]:
        read = tuple(s for s in self._rank_sets if any(_contains(s, rank) for rank in stages))
        self[stages] = read
        return read


def build_layout(
    rank_sets: Iterable[RankSet],
    rank: int,
    unions: Mapping[ShardUnion, RankSet] | None = None,
    pipelines: Iterable[frozenset[RankSet]] = (),
) -> Layout:
    """Return the layout of these lanes as `rank` sees it; of the pipelines the latest few."""
    ordered = sorted(rank_sets)
    own = tuple(rank_set for rank_set in ordered if _contains(rank_set, rank))
    lane_of = {rank_set: lane for lane, rank_set in enumerate(ordered)}
    return Layout(lane_of, own, unions or {}, tuple(pipelines)[-_MOST_PIPELINES:])


def stable_hash(text: str) -> int:
    """Return 63 bits: an int64 that is the same in every process, unlike hash()."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in few words: `0-127`, or `0-3, 8, 10`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def _contains(rank_set: RankSet, rank: int) -> bool:
    index = bisect_left(rank_set, rank)
    return index < len(rank_set) and rank_set[index] == rank
