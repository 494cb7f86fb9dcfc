"""Rank sets to a layout: the ordered lanes that all ranks of a group agree on.

A rank set is the sorted tuple of the global ranks whose partial norms of a gradient shard belong
together. Ranks know only their own; before the first reduce over a group, and again when a rank
meets a new one, all of them exchange what they know and build the same sorted layout. Layouts
belong to the group, not to who asks, and only grow.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .reduction_groups import ReductionGroup

__all__ = ["UNSHARDED", "Layout", "RankSet", "agree", "describe_ranks", "stable_hash"]

RankSet = tuple[int, ...]
UNSHARDED: RankSet = ()
"""The rank set of gradients that this rank holds whole. It has no lane."""


@dataclass(frozen=True)
class Layout:
    """The lanes of one group, in an order that is the same on all its ranks.

    Attributes:
        lane_of: The number of each rank set's lane; in the order of the lanes.
        own_rank_sets: Those that contain this rank, whose lanes it adds up.
    """

    lane_of: Mapping[RankSet, int]
    own_rank_sets: tuple[RankSet, ...]


def agree(group: ReductionGroup, rank_sets: Iterable[RankSet]) -> Layout:
    """Return the union of all ranks' rank sets and of the group's layout so far.

    Hashes go first, then the members of each distinct new set once, from the lowest rank that
    holds it; for 8192 ranks that is kilobytes, where every rank's own list would be hundreds of
    megabytes.

    Args:
        group: The ranks that agree.
        rank_sets: What this rank holds; may be empty.

    Ranks: all of the group, together; three small collectives, one where nothing is new.

    Raises:
        ValueError: On every rank, if a rank set has members outside the group.
    """
    known_sets = set(group.layout.lane_of) if group.layout else set()
    new = {
        stable_hash(repr(rank_set)): rank_set
        for rank_set in rank_sets
        if rank_set not in known_sets
    }
    announced = group.gather_ints([x for h in sorted(new) for x in (h, len(new[h]))])
    speakers: dict[int, tuple[int, int]] = {}
    for group_rank, row in enumerate(announced):
        for digest, size in zip(row[0::2], row[1::2], strict=True):
            speakers.setdefault(digest, (group_rank, size))
    merged = known_sets | _publish(group, new, speakers) if speakers else known_sets
    layout = _build_layout(merged, group.rank)
    outside = {r for rank_set in merged for r in rank_set} - set(group.ranks)
    if outside:
        raise ValueError(
            f"rank {group.rank}: gradients are sharded over ranks {describe_ranks(outside)}, which "
            f"are not in the group that was given ({describe_ranks(group.ranks)}); pass "
            "group=reduction_group(mesh) for a mesh that holds them all"
        )
    group.layout = layout
    return layout


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


def _publish(
    group: ReductionGroup, new: dict[int, RankSet], speakers: dict[int, tuple[int, int]]
) -> set[RankSet]:
    """Return the members of every announced set, each written by its speaker into a sum."""
    members: list[int] = []
    for digest, (group_rank, size) in sorted(speakers.items()):
        mine = group_rank == group.group_rank
        members += new[digest] if mine else [0] * size
    members = group.sum_ints(members)
    rank_sets = set()
    start = 0
    for _, (_, size) in sorted(speakers.items()):
        rank_sets.add(tuple(members[start : start + size]))
        start += size
    return rank_sets


def _build_layout(rank_sets: set[RankSet], rank: int) -> Layout:
    ordered = sorted(rank_sets)
    own = tuple(rank_set for rank_set in ordered if _contains(rank_set, rank))
    return Layout({rank_set: lane for lane, rank_set in enumerate(ordered)}, own)


def _contains(rank_set: RankSet, rank: int) -> bool:
    index = bisect_left(rank_set, rank)
    return index < len(rank_set) and rank_set[index] == rank
