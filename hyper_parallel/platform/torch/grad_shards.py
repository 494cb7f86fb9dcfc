"""Parameters to gradient shards with their rank sets."""

from __future__ import annotations

import functools
import itertools
import operator
import types
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .failure import join_some
from .lanes import UNSHARDED, stable_hash
from .torch_private import is_sharded, local_tensors, specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from .lanes import RankSet

__all__ = [
    "GradShard",
    "ParameterList",
    "PendingSum",
    "Reach",
    "collect_grad_shards",
    "rank_sets_of",
]

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

# Parameters looked at together: their objects stay in the second-level cache from one question
# that is asked of all to the next.
_AT_ONCE = 1024


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


class Reach(NamedTuple):
    """What the mesh and placements of a gradient say of it on this rank.

    Attributes:
        rank_set: The ranks whose pieces make up the norm.
        pending: The sum that it takes part in, if it is Partial.
        fault: Why it cannot be clipped, if so.
    """

    rank_set: RankSet
    pending: PendingSum | None = None
    fault: str | None = None


class GradShard(NamedTuple):
    """This rank's piece of one gradient.

    Attributes:
        local: The piece, any shape and strides; numel may be 0.
        rank_set: See `Reach`.
        pending: See `Reach`.
        position: Where the parameter stands in the list.
    """

    local: torch.Tensor
    rank_set: RankSet
    pending: PendingSum | None
    position: int


class ParameterList:
    """Parameters as they were passed, with the names that errors use.

    Args:
        parameters: A module, whose parameters have names, a tensor, or an iterable of tensors.
        names: Name by `id` of a parameter, for those of a module given earlier.
        are_gradients: The tensors are gradients themselves, as for `get_total_norm`.

    Attributes:
        tensors: What was listed, tensors or not.
        names: As passed, or the module's.
        are_gradients: As passed.
        failure: What the iterable raised on the way; it is raised where all ranks learn of it.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
        names: Mapping[int, str] = MappingProxyType({}),
        *,
        are_gradients: bool = False,
    ) -> None:
        self.names = names
        if isinstance(parameters, torch.nn.Module):
            named = dict(parameters.named_parameters())
            self.names = {id(parameter): name for name, parameter in named.items()}
            parameters = named.values()
        elif isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        self.are_gradients = are_gradients
        self.tensors: list[object] = []
        self.failure: Exception | None = None
        try:
            self.tensors.extend(parameters)
        except Exception as error:
            self.failure = error
        if isinstance(parameters, types.GeneratorType) and not (self.tensors or self.failure):
            warnings.warn(
                "the generator of parameters is empty or used up: nothing is clipped", stacklevel=3
            )

    def grad_of(self, parameter: object) -> object | None:
        """Return the gradient of a listed parameter, `main_grad` before `grad`."""
        if self.are_gradients:
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
        return any(isinstance(tensor, DTensor) for tensor in self.tensors) or any(
            isinstance(self.grad_of(tensor), DTensor) for tensor in self.tensors
        )

    def keys_of(self, position: int) -> tuple[int, int]:
        """Return `key` and `list_key` of a `PendingSum`."""
        name = self.names.get(id(self.tensors[position]))
        if name is not None:
            return stable_hash(name), 0
        shapes = [tuple(getattr(tensor, "shape", ())) for tensor in self.tensors]
        return stable_hash(str(position)), stable_hash(repr(shapes))


def collect_grad_shards(parameters: ParameterList, *, writable: bool = True) -> list[GradShard]:
    """Return the gradient shards of this rank, each once.

    The rank set comes from the gradient's spec if it is a DTensor, else from the parameter's. A
    parameter or gradient listed twice gives one shard.

    Args:
        parameters: What the user passed.
        writable: The shards will be scaled in place, so they must be such as can be.

    Raises:
        TypeError: With every gradient that cannot be clipped, and why.
        Exception: What the iterable of parameters raised.
    """
    if parameters.failure is not None:
        raise parameters.failure
    at_once = _collect_at_once(parameters)
    if at_once is not None:
        return at_once
    shards: list[GradShard] = []
    faults: list[str] = []
    # By id, and alive as long as the ids are compared: a property `main_grad` may make a new tensor
    # at every access.
    seen: dict[int, torch.Tensor] = {}
    for position, parameter in enumerate(parameters.tensors):
        if not isinstance(parameter, torch.Tensor):
            kind = type(parameter).__name__
            faults.append(f"{parameters.describe(position)} is a {kind}, not a tensor")
            continue
        grad = None if id(parameter) in seen else parameters.grad_of(parameter)
        if not isinstance(grad, torch.Tensor) or id(grad) in seen:
            continue
        seen |= {id(parameter): parameter, id(grad): grad}
        local = _local_of(grad)
        reach = _reach_of(grad if isinstance(grad, DTensor) else parameter)
        fault = reach.fault or _fault(local, writable=writable)
        pending = reach.pending
        if pending is not None:
            key, list_key = parameters.keys_of(position)
            pending = pending._replace(key=key, list_key=list_key)
            if local.layout != torch.strided:
                fault = fault or f"is Partial and has layout {local.layout}; make it dense"
        if fault:
            faults.append(f"the gradient of {parameters.describe(position)} {fault}")
        shards.append(GradShard(local, reach.rank_set, pending, position))
    if faults:
        raise TypeError(join_some(faults))
    return shards


def _collect_at_once(parameters: ParameterList) -> list[GradShard] | None:
    """Collect DTensors with dense shards of their own, the usual case, many at a time.

    About a microsecond for each (benchmarks/host_bandwidth.py --python), of which the loop that
    takes all other cases needs a dozen. None if any is otherwise.
    """
    shards: list[GradShard] = []
    ids: set[int] = set()
    for start in range(0, len(parameters.tensors), _AT_ONCE):
        tensors = parameters.tensors[start : start + _AT_ONCE]
        grads = tensors if parameters.are_gradients else _grads_at_once(tensors)
        if grads is None:
            return None
        positions: Iterable[int] = range(start, start + len(grads))
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            positions = [start + i for i, grad in enumerate(grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        rows = _shards_at_once(grads, positions)
        if rows is None:
            return None
        ids.update(map(id, grads))
        shards += rows
    return shards if len(ids) == len(shards) else None


def _grads_at_once(tensors: Sequence[object]) -> list[object] | None:
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, tensors))):
        return None
    if any(map(hasattr, tensors, itertools.repeat("main_grad"))):
        return None
    return list(map(getattr, tensors, itertools.repeat("grad"), itertools.repeat(None)))


def _shards_at_once(grads: Sequence[object], positions: Iterable[int]) -> list[GradShard] | None:
    if not set(map(type, grads)) <= {DTensor}:
        return None
    dtensors = cast("Sequence[DTensor]", grads)
    shards = local_tensors(dtensors)
    reaches = _known_reaches.of(dtensors)
    if not (
        set(map(type, shards)) <= {torch.Tensor}
        and _DTYPES.issuperset(map(_dtype_of, shards))
        and set(map(_layout_of, shards)) <= {torch.strided}
        and all(map(torch.Tensor.is_contiguous, shards))
        and not any(map(_is_meta, shards))
        and not any(map(torch.Tensor.is_inference, shards))
        and not any(map(_fault_of, reaches))
        and not any(map(_pending_of, reaches))
    ):
        return None
    rank_sets = map(_rank_set_of, reaches)
    rows = zip(shards, rank_sets, map(_pending_of, reaches), positions, strict=True)
    return list(map(GradShard._make, rows))


_dtype_of = operator.attrgetter("dtype")
_layout_of = operator.attrgetter("layout")
_is_meta = operator.attrgetter("is_meta")
_rank_set_of = operator.attrgetter("rank_set")
_pending_of = operator.attrgetter("pending")
_fault_of = operator.attrgetter("fault")


class _KnownReaches:
    """The reach of each spec that was met, on the rank that this process is now."""

    # FSDP2 gives every gradient of a parameter the same spec, so that models have thousands.
    _MOST = 1 << 17

    def __init__(self) -> None:
        self._rank = -1
        self._specs: dict[int, object] = {}  # keeps them alive, so that no other has their id
        self._reaches: dict[int, Reach] = {}

    def of(self, dtensors: Sequence[DTensor]) -> list[Reach]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank != self._rank or len(self._specs) > self._MOST:
            self._specs.clear()
            self._reaches.clear()
            self._rank = rank
        found = specs(dtensors)
        reaches = list(map(self._reaches.get, map(id, found)))
        for i, reach in enumerate(reaches) if None in reaches else ():
            if reach is None:
                self._specs[id(found[i])] = found[i]
                reaches[i] = self._reaches[id(found[i])] = _reach_of(dtensors[i])
        return cast("list[Reach]", reaches)


_known_reaches = _KnownReaches()


def rank_sets_of(parameters: ParameterList) -> set[RankSet]:
    """Return the rank sets that the parameters' own specs foretell for their gradients."""
    tensors = (tensor for tensor in parameters.tensors if isinstance(tensor, torch.Tensor))
    return {reach.rank_set for reach in map(_reach_of, tensors) if reach.rank_set}


def _local_of(grad: torch.Tensor) -> torch.Tensor:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if type(local) is not torch.Tensor and hasattr(local, "wait"):
        local = local.wait()  # an AsyncCollectiveTensor: its collective has not been waited for
    return local


def _reach_of(spec: torch.Tensor) -> Reach:
    if not isinstance(spec, DTensor):
        return Reach(UNSHARDED)
    mesh = spec.device_mesh
    return _resolve_reach(mesh, spec.placements, mesh.get_rank())


@functools.lru_cache(maxsize=4096)
def _resolve_reach(mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int) -> Reach:
    """Resolve the rank set: the sub-mesh through `rank` along the dims that hold distinct elements.

    Those are the dims that are sharded or Partial. On a rank outside the mesh, which holds no
    element, it is empty.
    """
    del rank  # part of the key: the same mesh after torch.distributed was started anew
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Reach(UNSHARDED)
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
    rank_set = _sub_mesh(mesh, coordinate, [*sharded, *partial])
    if not partial:
        return Reach(rank_set)
    return Reach(rank_set, PendingSum(_sub_mesh(mesh, coordinate, partial), ops.pop()))


def _sub_mesh(mesh: DeviceMesh, coordinate: Sequence[int], dims: Sequence[int]) -> RankSet:
    """Return the sorted ranks through `coordinate` along `dims`; empty if there is only one."""
    index = tuple(slice(None) if i in dims else place for i, place in enumerate(coordinate))
    ranks = mesh.mesh[index].flatten().tolist()
    return tuple(sorted(ranks)) if len(ranks) > 1 else UNSHARDED


def _fault(local: torch.Tensor, *, writable: bool) -> str | None:
    """Say why a local gradient cannot be measured or scaled; None where it can."""
    if local.device.type == "meta":
        return "is on the meta device and has no data"
    if local.dtype not in _DTYPES:
        return f"is {local.dtype}; expected a floating or complex dtype that torch computes in"
    if local.layout == torch.sparse_coo and local.dtype == torch.complex32:
        return "is a sparse complex32 tensor, which torch cannot coalesce; make it dense"
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
