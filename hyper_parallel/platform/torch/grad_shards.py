"""Parameters to gradient shards with their rank sets."""

from __future__ import annotations

import functools
import types
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .torch_private import is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from .lanes import RankSet

__all__ = ["GradShard", "ParameterList", "collect_grad_shards", "rank_sets_of"]

_DTYPES = frozenset(
    (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    )
)
_MOST_NAMED = 8


class GradShard(NamedTuple):
    """This rank's piece of one gradient.

    Attributes:
        local: The piece, any shape and strides; numel may be 0.
        rank_set: The ranks whose pieces make up the norm; empty where this rank alone holds it.
        position: Where the parameter stands in the list.
    """

    local: torch.Tensor
    rank_set: RankSet
    position: int


class ParameterList:
    """Parameters as they were passed, with the names that errors use.

    Args:
        parameters: A module, whose parameters have names, a tensor, or an iterable of tensors.
        names: Name by `id` of a parameter, for those of a module given earlier.
        are_gradients: The tensors are gradients themselves, as for `get_total_norm`.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
        names: Mapping[int, str] | None = None,
        *,
        are_gradients: bool = False,
    ) -> None:
        self.names = dict(names or {})
        if isinstance(parameters, torch.nn.Module):
            self.names |= {id(p): name for name, p in parameters.named_parameters()}
            parameters = parameters.parameters()
        elif isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        self.tensors: list[object] = list(parameters)
        if isinstance(parameters, types.GeneratorType) and not self.tensors:
            warnings.warn(
                "the generator of parameters is empty or used up: nothing is clipped", stacklevel=4
            )
        self._are_gradients = are_gradients

    def grad_of(self, parameter: object) -> object | None:
        """Return the gradient of a listed parameter, `main_grad` before `grad`."""
        if self._are_gradients:
            return parameter
        main_grad = getattr(parameter, "main_grad", None)
        return main_grad if main_grad is not None else getattr(parameter, "grad", None)

    def describe(self, position: int) -> str:
        """Name a parameter as an error should: by its name, else by index and shape."""
        tensor = self.tensors[position]
        if not isinstance(tensor, torch.Tensor):
            return f"parameters[{position}]"
        unnamed = f"parameters[{position}] of shape {tuple(tensor.shape)}"
        return self.names.get(id(tensor), unnamed)

    def has_dtensor(self) -> bool:
        """Tell whether a parameter, or its gradient, is a DTensor."""
        return any(
            isinstance(tensor, DTensor) or isinstance(self.grad_of(tensor), DTensor)
            for tensor in self.tensors
        )


def collect_grad_shards(parameters: ParameterList, *, writable: bool = True) -> list[GradShard]:
    """Return the gradient shards of this rank, each once.

    The rank set comes from the gradient's spec if it is a DTensor, else from the parameter's. A
    parameter or gradient listed twice gives one shard.

    Args:
        parameters: What the user passed.
        writable: The shards will be scaled in place, so they must be such as can be.

    Raises:
        TypeError: With every gradient that cannot be clipped, and why.
    """
    shards: list[GradShard] = []
    faults: list[str] = []
    seen: set[int] = set()
    for position, parameter in enumerate(parameters.tensors):
        if not isinstance(parameter, torch.Tensor):
            kind = type(parameter).__name__
            faults.append(f"{parameters.describe(position)} is a {kind}, not a tensor")
            continue
        grad = parameters.grad_of(parameter)
        if not isinstance(grad, torch.Tensor) or id(grad) in seen:
            continue
        seen.add(id(grad))
        local, rank_set, fault = _locate(grad, parameter)
        fault = fault or _fault(local, writable=writable)
        if fault:
            faults.append(f"the gradient of {parameters.describe(position)} {fault}")
        shards.append(GradShard(local, rank_set, position))
    if faults:
        more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        raise TypeError("; ".join(faults[:_MOST_NAMED]) + more)
    return shards


def rank_sets_of(parameters: ParameterList) -> set[RankSet]:
    """Return the rank sets that the parameters' own specs foretell for their gradients."""
    tensors = (tensor for tensor in parameters.tensors if isinstance(tensor, torch.Tensor))
    located = (_locate(tensor, tensor) for tensor in tensors)
    return {rank_set for _, rank_set, _ in located if rank_set}


def _locate(
    grad: torch.Tensor, parameter: torch.Tensor
) -> tuple[torch.Tensor, RankSet, str | None]:
    """Return the local tensor of a gradient, its rank set, and what is wrong with its spec."""
    spec = grad if isinstance(grad, DTensor) else parameter
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if type(local) is not torch.Tensor and hasattr(local, "wait"):
        local = local.wait()  # an AsyncCollectiveTensor: its collective has not been waited for
    if not isinstance(spec, DTensor):
        return local, (), None
    mesh, placements = spec.device_mesh, spec.placements
    unknown = [p for p in placements if not (is_sharded(p) or isinstance(p, (Shard, Replicate)))]
    if unknown:
        remedy = "redistribute it to Shard or Replicate before clipping"
        kind = "is Partial" if isinstance(unknown[0], Partial) else "has an unknown placement"
        return local, (), f"{kind} ({unknown[0]} on mesh {mesh.mesh_dim_names}): {remedy}"
    return local, _resolve_rank_set(mesh, placements, mesh.get_rank()), None


@functools.lru_cache(maxsize=4096)
def _resolve_rank_set(mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int) -> RankSet:
    """Return the ranks of the sub-mesh through `rank` along the sharded mesh dims of size > 1.

    Empty for a gradient that `rank` holds whole, and on a rank outside the mesh, which holds none.
    """
    del rank  # part of the key: the same mesh after torch.distributed was started anew
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if is_sharded(placement) else place
        for placement, place in zip(placements, coordinate, strict=True)
    )
    ranks = mesh.mesh[index].flatten().tolist()
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


def _fault(local: torch.Tensor, *, writable: bool) -> str | None:
    """Say why a local gradient cannot be measured or scaled; None where it can."""
    if local.device.type == "meta":
        return "is on the meta device and has no data"
    if local.dtype not in _DTYPES:
        return f"is {local.dtype}; expected a floating or complex dtype that torch computes in"
    if local.layout not in (torch.strided, torch.sparse_coo):
        return f"has layout {local.layout}; expected torch.strided or torch.sparse_coo"
    if not writable:
        return None
    if local.is_inference() and not torch.is_inference_mode_enabled():
        return "is an inference tensor and cannot be scaled in place; clone it first"
    if local.layout == torch.strided and not local.is_contiguous():
        repeats = [
            size > 1 and step == 0 for size, step in zip(local.shape, local.stride(), strict=True)
        ]
        if any(repeats):
            return "is an expanded tensor and cannot be scaled in place; call .contiguous() first"
    return None
