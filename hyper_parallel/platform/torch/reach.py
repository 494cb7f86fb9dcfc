"""Mesh and placements of a gradient to what they say of it on this rank."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .lanes import UNSHARDED, stable_hash
from .torch_private import is_sharded, specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from .lanes import LaneKey, RankSet

__all__ = ["KnownReaches", "PendingSum", "Reach", "reach_of"]


class PendingSum(NamedTuple):
    """A gradient that is Partial: its elements are still to be added up over ranks.

    Attributes:
        ranks: The ranks over which it is.
        op: `sum` or `avg`.
        key: 63 bits by which the ranks find each other's addends: from the parameter's name if it
            is known, else from its place in the list.
        list_key: What ranks that go by place must agree on: 63 bits of the shapes of all listed
            tensors; 0 where the name is known.
    """

    ranks: RankSet
    op: str
    key: int = 0
    list_key: int = 0


@dataclass(frozen=True, eq=False)
class Reach:
    """What the mesh and placements of a gradient say of it on this rank.

    Shared by all gradients of one mesh and placements, and compared as an object: a model has few.

    Attributes:
        rank_set: The ranks whose pieces make up the norm; where only the agreement can tell, or no
            lane is to be had, what stands for them.
        pending: The sum that it takes part in, if it is Partial.
        fault: Why it cannot be clipped, if so.
        copies: The ranks that hold the same piece, this one among them; empty if there is no other.
        siblings: Its rank set and those of the copies, whose norms should be equal; else empty.
        kind: 63 bits of the mesh's shape and sharded dims; 0 without a mesh.
    """

    rank_set: LaneKey
    pending: PendingSum | None = None
    fault: str | None = None
    copies: RankSet = ()
    siblings: tuple[RankSet, ...] = ()
    kind: int = 0


_UNSHARDED_REACH = Reach(UNSHARDED)


def reach_of(spec: torch.Tensor) -> Reach:
    """Return the reach of a DTensor; of any other tensor, that this rank holds it whole."""
    if not isinstance(spec, DTensor):
        return _UNSHARDED_REACH
    mesh = spec.device_mesh
    return _resolve_reach(mesh, spec.placements, mesh.get_rank())


@functools.lru_cache(maxsize=4096)
def _resolve_reach(mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int) -> Reach:
    """Resolve the rank set: the sub-mesh through `rank` along the dims that hold distinct elements.

    Those are the dims that are sharded or Partial. On a rank outside the mesh, which holds no
    element, it is empty.
    """
    # Not mesh.get_coordinate(): torch keeps meshes in caches of its own, and hands out one that was
    # made before torch.distributed was started anew, with the coordinate of that time.
    places = (mesh.mesh == rank).nonzero().tolist()
    if not places:
        return Reach(UNSHARDED)
    coordinate = places[0]
    sharded = [i for i, placement in enumerate(placements) if is_sharded(placement)]
    partial = [i for i, p in enumerate(placements) if isinstance(p, Partial) and mesh.size(i) > 1]
    known = (Shard, Replicate, Partial)
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if not all(is_sharded(p) or isinstance(p, known) for p in placements) or not (
        ops <= {"sum"} or ops <= {"avg"}
    ):
        return Reach(
            UNSHARDED,
            fault=f"has placements {placements}; expected Shard, Replicate and Partial of one of "
            "sum and avg: redistribute it before clipping",
        )
    distinct = sorted({*sharded, *partial})
    copied = [i for i in range(mesh.ndim) if i not in distinct]
    copies = _sub_mesh(mesh, coordinate, copied)
    rank_set = _sub_mesh(mesh, coordinate, distinct)
    return Reach(
        rank_set,
        PendingSum(_sub_mesh(mesh, coordinate, partial), ops.pop()) if partial else None,
        copies=copies,
        siblings=_siblings(mesh, copied, distinct) if rank_set and copies else (),
        kind=stable_hash(repr((tuple(mesh.shape), mesh.mesh_dim_names, distinct))),
    )


def _sub_mesh(mesh: DeviceMesh, coordinate: Sequence[int], dims: Sequence[int]) -> RankSet:
    """Return the sorted ranks through `coordinate` along `dims`; empty if there is only one."""
    index = tuple(slice(None) if i in dims else place for i, place in enumerate(coordinate))
    ranks = mesh.mesh[index].flatten().tolist()
    return tuple(sorted(ranks)) if len(ranks) > 1 else UNSHARDED


def _siblings(
    mesh: DeviceMesh, copied: Sequence[int], distinct: Sequence[int]
) -> tuple[RankSet, ...]:
    """Return the rank sets of all copies, one for each place along the dims `copied`."""
    ranks = mesh.mesh.permute(*copied, *distinct)
    rows = ranks.reshape(math.prod(mesh.size(i) for i in copied), -1).tolist()
    return tuple(sorted(tuple(sorted(row)) for row in rows))


class KnownReaches:
    """The reach of each spec that was met, on the rank that this process is now."""

    # FSDP2 gives every gradient of a parameter the same spec, so that models have thousands.
    _MOST = 1 << 17

    def __init__(self) -> None:
        self._rank = -1
        self._specs: dict[int, object] = {}  # keeps them alive, so that no other has their id
        self._reaches: dict[int, Reach] = {}

    def of(self, tensors: Sequence[torch.Tensor]) -> list[Reach]:
        """Return one reach for each, DTensor or not."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank != self._rank or len(self._specs) > self._MOST:
            self._specs.clear()
            self._reaches.clear()
            self._rank = rank
        found = specs(tensors)
        reaches = list(map(self._reaches.get, map(id, found)))
        for i, reach in enumerate(reaches) if None in reaches else ():
            if reach is None:
                self._specs[id(found[i])] = found[i]
                reaches[i] = self._reaches[id(found[i])] = reach_of(tensors[i])
        return cast("list[Reach]", reaches)
