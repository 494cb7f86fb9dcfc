"""The exchange in which the ranks of a group agree on a layout.

Each rank states what it knows; all see all statements, and so come to the same layout or raise the
same error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .lanes import Layout, ShardUnion, Statement, build_layout, describe_ranks, stable_hash
from .meeting import AgreementError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .lanes import RankSet
    from .reduction_groups import ReductionGroup

__all__ = ["agree"]

# What follows the hashes of new rank sets in a statement's row; hashes are not negative.
_STAGES, _UNION, _INCOMPLETE = -1, -2, -3


def agree(group: ReductionGroup, statement: Statement) -> Layout:
    """Return the union of all ranks' rank sets and of the group's layout so far.

    Hashes go first, then the members of each distinct new set once, from the lowest rank that
    holds it; for 8192 ranks that is kilobytes, where every rank's own list would be hundreds of
    megabytes.

    Args:
        group: The ranks that agree.
        statement: What this rank holds and was told; may be empty.

    Ranks: all of the group, together; three small collectives, one or two where nothing is new.

    Raises:
        AgreementError: On every rank, if a rank set or a pp group has members outside the group,
            ranks of one pp group were not all given it, or ranks contradict each other on a tensor
            that is sharded over a group.
    """
    known = set(group.layout.lane_of) if group.layout else set()
    new = _new_sets(statement, known)
    # Thousands of ranks make few different statements: each is read once.
    gathered = list(map(tuple, group.gather_ints(_to_ints(statement, new))))
    speakers: dict[tuple[int, ...], int] = {}  # the lowest rank that makes each
    for group_rank, ints in enumerate(gathered):
        speakers.setdefault(ints, group_rank)
    distinct = {ints: _Row.parse(ints) for ints in speakers}
    published = _publish(group, new, {speakers[ints]: row for ints, row in distinct.items()})
    lanes = known | {published[digest] for row in distinct.values() for digest in row.lanes}
    pipelines = group.layout.pipelines if group.layout else ()
    unions = dict(group.layout.unions) if group.layout else {}
    # Where a rank failed all will raise its error, to which any other would be a consequence.
    if all(row.is_complete for row in distinct.values()):
        rows = map(distinct.__getitem__, gathered)
        stated = [published[row.stages] if row.stages else None for row in rows]
        pipeline = _agree_on_stages(group, stated)
        if pipeline:
            pipelines = (*(p for p in pipelines if p != pipeline), pipeline)
        stated_unions = {ints: row.unions_of(published) for ints, row in distinct.items()}
        agreed = _resolve_unions(group, [stated_unions[ints] for ints in gathered])
        if any(unions.get(union, rank_set) != rank_set for union, rank_set in agreed.items()):
            unions.clear()  # of another model, with which this one shares some of them
        unions |= agreed
        lanes |= set(agreed.values())
    outside = {r for rank_set in lanes for r in rank_set} - set(group.ranks)
    if outside:
        raise AgreementError(
            f"rank {group.rank}: gradients are sharded over ranks {describe_ranks(outside)}, which "
            f"are not in the group that was given ({describe_ranks(group.ranks)}); pass "
            "group=reduction_group(mesh) for a mesh that holds them all"
        )
    group.layout = build_layout(lanes, group.rank, unions, pipelines)
    return group.layout


@dataclass
class _Row:
    """One rank's statement as it went over the wire: rank sets by their hashes."""

    sizes: dict[int, int]  # of the sets whose members it can tell
    lanes: list[int]  # those of them that want a lane
    stages: int = 0
    unions: tuple[tuple[int, int, int], ...] = ()
    is_complete: bool = True

    @classmethod
    def parse(cls, ints: Sequence[int]) -> _Row:
        row = cls({}, [])
        rest = iter(ints)
        for first in rest:
            if first == _STAGES:
                row.stages = next(rest)
            elif first == _UNION:
                row.unions += ((next(rest), next(rest), next(rest)),)
            elif first == _INCOMPLETE:
                row.is_complete = False
            else:
                size = next(rest)
                row.sizes[first] = abs(size)
                if size > 0:
                    row.lanes.append(first)
        return row

    def unions_of(self, published: Mapping[int, RankSet]) -> list[ShardUnion]:
        return [ShardUnion(published[b], published[o], kind) for b, o, kind in self.unions]


def _digest(rank_set: RankSet) -> int:
    return stable_hash(repr(rank_set))


def _new_sets(statement: Statement, known: set[RankSet]) -> dict[int, tuple[RankSet, bool]]:
    """Return by their hashes the sets that this rank can tell, and whether they want a lane."""
    sets: dict[RankSet, bool] = {}
    for key in statement.lanes:
        if isinstance(key, ShardUnion):
            sets.setdefault(key.base, False)
            sets.setdefault(key.over, False)
        elif key not in known:
            sets[key] = True
    if statement.stages is not None:
        sets.setdefault(statement.stages, False)
    return {_digest(rank_set): (rank_set, wants_lane) for rank_set, wants_lane in sets.items()}


def _to_ints(statement: Statement, new: Mapping[int, tuple[RankSet, bool]]) -> list[int]:
    ints = []
    for digest, (rank_set, wants_lane) in sorted(new.items()):
        ints += [digest, len(rank_set) if wants_lane else -len(rank_set)]
    if statement.stages is not None:
        ints += [_STAGES, _digest(statement.stages)]
    for key in statement.lanes:
        if isinstance(key, ShardUnion):
            ints += [_UNION, _digest(key.base), _digest(key.over), key.kind]
    return ints if statement.is_complete else [*ints, _INCOMPLETE]


def _publish(
    group: ReductionGroup, new: Mapping[int, tuple[RankSet, bool]], rows: Mapping[int, _Row]
) -> dict[int, RankSet]:
    """Return the members of every announced set, each written by its speaker into a sum.

    `rows` has the lowest rank of each statement, in rising order.
    """
    speakers: dict[int, tuple[int, int]] = {}
    for group_rank, row in rows.items():
        for digest, size in row.sizes.items():
            speakers.setdefault(digest, (group_rank, size))
    if not speakers:
        return {}
    members: list[int] = []
    for digest, (group_rank, size) in sorted(speakers.items()):
        members += new[digest][0] if group_rank == group.group_rank else [0] * size
    members = group.sum_ints(members)
    rank_sets = {}
    start = 0
    for digest, (_, size) in sorted(speakers.items()):
        rank_sets[digest] = tuple(members[start : start + size])
        start += size
    return rank_sets


def _agree_on_stages(
    group: ReductionGroup, stated: Sequence[RankSet | None]
) -> frozenset[RankSet] | None:
    """Check that the pp groups divide the group's ranks; None if there are none."""
    without = [rank for rank, stages in zip(group.ranks, stated, strict=True) if stages is None]
    if len(without) == len(stated):
        return None
    if without:
        raise AgreementError(
            f"rank(s) {describe_ranks(without)} were given no pp_group, and the others were; all "
            f"ranks of the group ({describe_ranks(group.ranks)}) must pass theirs. No gradient was "
            "changed on any rank"
        )
    by_rank = {rank: s for rank, s in zip(group.ranks, stated, strict=True) if s is not None}
    pipeline = frozenset(by_rank.values())
    for stages in sorted(pipeline):
        outside = set(stages) - by_rank.keys()
        if outside:
            raise AgreementError(
                f"the pp_group of ranks {describe_ranks(stages)} has ranks "
                f"{describe_ranks(outside)}, which are not in the group that is reduced over "
                f"({describe_ranks(group.ranks)}); pass a group= that holds the ranks of all "
                "stages, or none for the default group. No gradient was changed on any rank"
            )
        for rank in stages:
            if by_rank[rank] != stages:
                raise AgreementError(
                    f"the ranks of a pp_group must all pass it: some rank was given the one of "
                    f"ranks {describe_ranks(stages)}, and rank {rank} the one of ranks "
                    f"{describe_ranks(by_rank[rank])}. No gradient was changed on any rank"
                )
    return pipeline


def _resolve_unions(
    group: ReductionGroup, stated: Sequence[Iterable[ShardUnion]]
) -> dict[ShardUnion, RankSet]:
    """Return the rank set of every union; check that its members come to the same."""
    bases: dict[tuple[RankSet, int], dict[int, set[RankSet]]] = {}
    for rank, unions in zip(group.ranks, stated, strict=True):
        for union in unions:
            by_rank = bases.setdefault((union.over, union.kind), {})
            by_rank.setdefault(rank, set()).add(union.base)
    resolved: dict[ShardUnion, RankSet] = {}
    merged: dict[frozenset[RankSet], RankSet] = {}  # the ranks of a grid share few unions
    for (over, kind), by_rank in sorted(bases.items()):
        _validate_counterparts(over, by_rank)
        together = frozenset().union(*by_rank.values())
        if together not in merged:
            merged[together] = tuple(sorted(frozenset().union(*together)))
        resolved |= {ShardUnion(base, over, kind): merged[together] for base in together}
    seen_by = {
        (rank, union.kind, resolved[union])
        for rank, unions in zip(group.ranks, stated, strict=True)
        for union in unions
    }
    for kind, rank_set in sorted({(union.kind, ranks) for union, ranks in resolved.items()}):
        astray = [rank for rank in rank_set if (rank, kind, rank_set) not in seen_by]
        if astray:
            raise AgreementError(
                f"a tensor declared with sharded_over is sharded over ranks "
                f"{describe_ranks(rank_set)} in all, which rank(s) {describe_ranks(astray)} do not "
                "come to; every rank that holds a shard must declare the group of its own place "
                "in the mesh. No gradient was changed on any rank"
            )
    return resolved


def _validate_counterparts(over: RankSet, by_rank: Mapping[int, set[RankSet]]) -> None:
    """Check that each rank of a `sharded_over` group declares the tensor, on one mesh."""
    silent = [rank for rank in over if rank not in by_rank]
    if silent:
        raise AgreementError(
            f"a DTensor was declared with sharded_over the group of ranks {describe_ranks(over)}, "
            f"but rank(s) {describe_ranks(silent)} declared none on a mesh of the same shape; all "
            "ranks of that group must, and be in the group that is reduced over. No gradient was "
            "changed on any rank"
        )
    torn = [rank for rank in over if len(by_rank[rank]) > 1]
    if torn:
        raise AgreementError(
            f"DTensors on different meshes of the same shape were declared with sharded_over the "
            f"group of ranks {describe_ranks(over)}, and cannot be told apart (on rank(s) "
            f"{describe_ranks(torn)}); give the meshes' dims names. No gradient was changed on any "
            "rank"
        )
