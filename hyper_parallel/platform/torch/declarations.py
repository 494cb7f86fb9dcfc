"""What the user says of ranks and tensors beyond what DTensors say of themselves.

`pp_group`, `sharded_over` and `replicated_over` change the rank sets of gradient shards; here, and
nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .failure import join_some
from .lanes import UNCOUNTED, UNSHARDED, ShardUnion, Statement, describe_ranks
from .reach import Reach, reach_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .grad_shards import GradShards
    from .lanes import LaneKey, RankSet
    from .parameter_list import ParameterList

__all__ = ["NOTHING_DECLARED", "Declarations", "Groups"]

Groups = Mapping[torch.Tensor, dist.ProcessGroup]


@dataclass(frozen=True)
class Declarations:
    """The ranks that declared groups stand for.

    Attributes:
        stages: Of the pp group, whose ranks hold different parameters; None if none was passed.
        sharded: By tensor, ranks that hold a distinct shard each, beside what its DTensor says.
        copied: By tensor, ranks that hold copies, which count once.
    """

    stages: RankSet | None = None
    sharded: Mapping[torch.Tensor, RankSet] = field(default_factory=dict)
    copied: Mapping[torch.Tensor, RankSet] = field(default_factory=dict)

    @classmethod
    def resolved(
        cls,
        pp_group: dist.ProcessGroup | None,
        sharded_over: Groups | None,
        replicated_over: Groups | None,
    ) -> Declarations:
        """Resolve groups to ranks.

        Raises:
            ValueError: If a group lacks this rank, or torch.distributed is not initialized.
            TypeError: If a key is no tensor.
        """
        ranks_of = _RanksOf()
        stages = None if pp_group is None else ranks_of("pp_group", pp_group)
        return cls(
            stages,
            {t: ranks_of("sharded_over", group, t) for t, group in (sharded_over or {}).items()},
            {
                t: ranks_of("replicated_over", group, t)
                for t, group in (replicated_over or {}).items()
            },
        )

    def place(self, shards: GradShards, listed: ParameterList) -> GradShards:
        """Return the shards with the rank sets that follow from what is declared.

        Raises:
            ValueError: If a declared tensor is neither listed nor of the model, or a declaration
                contradicts a DTensor, or another one.
        """
        self._validate_known(listed)
        if self.stages is None and not self.sharded and not self.copied:
            return shards
        placed = {reach: self._place_on_stages(reach) for reach in shards.distinct_reaches}
        reaches = list(map(placed.__getitem__, shards.reaches))
        if self._groups_of:
            self._place_all_declared(shards, listed, reaches)
        return replace(shards, reaches=reaches)

    @functools.cached_property
    def _groups_of(self) -> dict[int, tuple[RankSet, RankSet]]:
        """By id of a tensor, what it is sharded and what it is replicated over."""
        declared = {id(tensor): tensor for tensor in (*self.sharded, *self.copied)}
        return {
            i: (self.sharded.get(tensor, ()), self.copied.get(tensor, ()))
            for i, tensor in declared.items()
        }

    def _place_all_declared(
        self, shards: GradShards, listed: ParameterList, reaches: list[Reach]
    ) -> None:
        """Replace the reaches of declared tensors."""
        faults = []
        placed: dict[tuple[Reach, RankSet, RankSet], Reach] = {}  # few, for any number of tensors
        for i, position in enumerate(shards.positions):
            groups = self._groups_of.get(id(listed.tensors[position]))
            if groups is None:
                continue
            key = (shards.reaches[i], *groups)
            if key not in placed:
                if fault := self._contradiction(*key):
                    faults.append(f"{listed.describe(position)} {fault}")
                    continue
                placed[key] = self._place_declared(*key)
            reaches[i] = placed[key]
        if faults:
            raise ValueError(join_some(faults))

    def statement(self, lanes: Iterable[LaneKey], *, is_complete: bool = True) -> Statement:
        """Return what this rank brings to an agreement.

        A declared DTensor is in it whether or not it has a gradient: others wait to hear of it.

        Args:
            lanes: What it holds.
            is_complete: See `Statement`.
        """
        stated = set(lanes)
        for tensor, over in self.sharded.items():
            base = reach_of(tensor)
            if base.rank_set and len(over) > 1:
                stated.add(_union(base, over))
        return Statement(stated, self.stages, is_complete)

    def _validate_known(self, listed: ParameterList) -> None:
        if not self._groups_of:
            return
        unknown = self._groups_of.keys() - listed.names.keys() - set(map(id, listed.tensors))
        if unknown:
            declared = {id(tensor): tensor for tensor in (*self.sharded, *self.copied)}
            shapes = join_some([f"one of shape {tuple(declared[i].shape)}" for i in unknown])
            raise ValueError(
                f"{len(unknown)} of the tensors in sharded_over and replicated_over are not among "
                f"the parameters ({shapes}); pass the very tensors that are listed, as they are "
                "after the model was sharded"
            )

    def _place_on_stages(self, reach: Reach) -> Reach:
        """Give unsharded gradients the pp group's lane, and count a DTensor's copies in it once."""
        if self.stages is None or len(self.stages) == 1:
            return reach
        if len(shared := _shared(reach.copies, self.stages)) > 1:
            if reach.pending is not None:
                raise ValueError(
                    f"a gradient with copies on ranks {describe_ranks(shared)} of its pp_group is "
                    "Partial; reduce it before clipping"
                )
            counted = reach.rank_set or self.stages
            first = shared[0] == dist.get_rank()
            return replace(reach, rank_set=counted if first else UNCOUNTED, siblings=())
        return replace(reach, rank_set=self.stages) if reach.rank_set == UNSHARDED else reach

    def _place_declared(self, reach: Reach, over: RankSet, copied: RankSet) -> Reach:
        if len(over) > 1:
            key = _union(reach, over) if reach.rank_set else over
            reach = replace(reach, rank_set=key, siblings=())
        copies = _shared(copied, self.stages or ())
        if len(copies) > 1:
            reach = replace(reach, copies=tuple(sorted({*reach.copies, *copies})))
        return self._place_on_stages(reach)

    def _contradiction(self, reach: Reach, over: RankSet, copied: RankSet) -> str | None:
        """Say what declarations of a tensor cannot both be true; None where they can."""
        if both := _other_ranks(over, copied):
            return f"is declared both sharded and replicated over ranks {describe_ranks(both)}"
        if both := _other_ranks(over, reach.copies):
            return (
                f"is declared sharded over ranks {describe_ranks(both)}, but its DTensor is "
                "replicated over them"
            )
        distinct = reach.rank_set
        assert not isinstance(distinct, ShardUnion)  # noqa: S101 - of a reach not placed yet
        if both := _other_ranks(copied, distinct):
            return (
                f"is declared replicated over ranks {describe_ranks(both)}, but its DTensor is "
                "sharded over them"
            )
        if len(copied) > 1 and reach.pending is not None:
            return "is declared replicated, but its gradient is Partial; reduce it before clipping"
        if len(copied) > 1 and (distinct or len(over) > 1):
            outside = set(copied) - set(self.stages or ())
            if outside:
                return (
                    "is sharded and declared replicated, which takes a pp_group that holds all "
                    f"copies; ranks {describe_ranks(outside)} are not in it"
                )
        return None


NOTHING_DECLARED = Declarations()


class _RanksOf:
    """Sorted global ranks of groups, each looked up once."""

    def __init__(self) -> None:
        self._known: dict[dist.ProcessGroup, RankSet] = {}

    def __call__(self, argument: str, group: dist.ProcessGroup, tensor: object = None) -> RankSet:
        if argument != "pp_group" and not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"expected tensors as keys of {argument}, got a {type(tensor).__name__}"
            )
        if group not in self._known:
            self._known[group] = _ranks(argument, group)
        return self._known[group]


def _ranks(argument: str, group: dist.ProcessGroup) -> RankSet:
    if not dist.is_initialized():
        raise ValueError(f"{argument} was given, but torch.distributed is not initialized")
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in a group that it was given in {argument}; pass the "
            "group of this rank's own place in the mesh"
        )
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _union(reach: Reach, over: RankSet) -> ShardUnion:
    base = reach.rank_set
    assert not isinstance(base, ShardUnion)  # noqa: S101 - of a reach that is not placed yet
    return ShardUnion(base, over, reach.kind)


def _shared(ranks: RankSet, others: RankSet) -> RankSet:
    return tuple(sorted(set(ranks) & set(others)))


def _other_ranks(ranks: RankSet, others: RankSet) -> RankSet:
    """Return what both have, other than this rank."""
    shared = _shared(ranks, others)
    return tuple(rank for rank in shared if rank != dist.get_rank()) if shared else ()
