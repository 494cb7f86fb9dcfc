"""Parameters to gradient shards with their rank sets.

The shards are kept as columns, one list for each property: a model has thousands of parameters, and
an object for each would cost more than all that is asked of it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast, overload

import torch
from torch.distributed.tensor import DTensor

from .failure import join_some
from .lanes import UNCOUNTED, UNSHARDED
from .reach import KnownReaches, PendingSum, Reach, reach_of
from .torch_private import local_tensors, num_stored_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .lanes import LaneKey
    from .parameter_list import ParameterList

__all__ = ["WIDE_DTYPES", "GradShard", "GradShards", "collect_grad_shards", "foretell_grad_shards"]

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
WIDE_DTYPES = frozenset((torch.float64, torch.complex128))
"""Of gradients whose norm is float64."""

# Parameters looked at together: their objects stay in the second-level cache from one question
# that is asked of all to the next.
_AT_ONCE = 1024


class GradShard(NamedTuple):
    """This rank's piece of one gradient.

    Attributes:
        local: The piece, any shape and strides; numel may be 0.
        rank_set: See `Reach`.
        pending: See `Reach`.
        position: Where the parameter stands in the list.
    """

    local: torch.Tensor
    rank_set: LaneKey
    pending: PendingSum | None
    position: int


@dataclass(eq=False)
class GradShards(Sequence[GradShard]):
    """This rank's gradient shards, as columns with one entry for each.

    Attributes:
        tensors: The pieces.
        reaches: What their meshes and placements say of them.
        positions: Where their parameters stand in the list.
        are_plain: Whether all pieces are known to be on the CPU, strided and contiguous.
    """

    tensors: list[torch.Tensor]
    reaches: list[Reach]
    positions: list[int]
    are_plain: bool = False

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> GradShard: ...
    @overload
    def __getitem__(self, index: slice) -> GradShards: ...
    def __getitem__(self, index: int | slice) -> GradShard | GradShards:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        reach = self.reaches[index]
        return GradShard(self.tensors[index], reach.rank_set, reach.pending, self.positions[index])

    @functools.cached_property
    def distinct_reaches(self) -> set[Reach]:
        """The reaches that any of them has."""
        return set(self.reaches)

    @property
    def lane_keys(self) -> set[LaneKey]:
        """The lanes that any of them has, or takes part in the sum of."""
        keys = {reach.rank_set for reach in self.distinct_reaches}
        keys |= {reach.pending.ranks for reach in self.distinct_reaches if reach.pending}
        return keys - {UNSHARDED, UNCOUNTED}

    @functools.cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes that any of them has."""
        return set(map(_dtype_of, self.tensors))

    @functools.cached_property
    def host_bytes(self) -> int:
        """Bytes that one pass over those in host memory touches."""
        if self.are_plain:
            return sum(map(_nbytes_of, self.tensors))
        return sum(map(num_stored_bytes, filter(_is_cpu, self.tensors)))

    @functools.cached_property
    def whole(self) -> GradShards:
        """Those that are not Partial."""
        if not any(reach.pending for reach in self.distinct_reaches):
            return self
        return self.select(i for i, reach in enumerate(self.reaches) if reach.pending is None)

    @functools.cached_property
    def pending(self) -> GradShards:
        """Those that are."""
        if self.whole is self:
            return GradShards([], [], [])
        return self.select(i for i, reach in enumerate(self.reaches) if reach.pending)

    def indices_by_rank_set(self) -> dict[LaneKey, Sequence[int]]:
        """Return which of them have each rank set."""
        rank_sets = {reach.rank_set for reach in self.distinct_reaches}
        if len(rank_sets) == 1:
            return {rank_sets.pop(): range(len(self))}
        indices: dict[LaneKey, list[int]] = {rank_set: [] for rank_set in rank_sets}
        # Tuples of many ranks are slow to hash: once for each reach, not for each shard.
        appends = {reach: indices[reach.rank_set].append for reach in self.distinct_reaches}
        for index, reach in enumerate(self.reaches):
            appends[reach](index)
        return dict(indices)

    def select(self, indices: Iterable[int]) -> GradShards:
        """Return those at `indices`, in that order."""
        chosen = list(indices)
        return GradShards(
            [self.tensors[i] for i in chosen],
            [self.reaches[i] for i in chosen],
            [self.positions[i] for i in chosen],
            are_plain=self.are_plain,
        )


def collect_grad_shards(parameters: ParameterList, *, writable: bool = True) -> GradShards:
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
    return at_once if at_once is not None else _collect_one_by_one(parameters, writable=writable)


def _collect_one_by_one(parameters: ParameterList, *, writable: bool) -> GradShards:
    shards = GradShards([], [], [])
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
        reach = reach_of(grad if isinstance(grad, DTensor) else parameter)
        fault = reach.fault or _fault(local, writable=writable)
        if reach.pending is not None:
            key, list_key = parameters.keys_of(position)
            pending = reach.pending._replace(key=key, list_key=list_key)
            reach = replace(reach, pending=pending)
            if local.layout != torch.strided:
                fault = fault or f"is Partial and has layout {local.layout}; make it dense"
        if fault:
            faults.append(f"the gradient of {parameters.describe(position)} {fault}")
        shards.tensors.append(local)
        shards.reaches.append(reach)
        shards.positions.append(position)
    if faults:
        raise TypeError(join_some(faults))
    return shards


def _collect_at_once(parameters: ParameterList) -> GradShards | None:
    """Collect DTensors and plain tensors that are dense, the usual case, many at a time.

    Well under a microsecond for each (benchmarks/host_bandwidth.py --python), of which the loop
    that takes all other cases needs a dozen. None if any is otherwise.
    """
    shards = GradShards([], [], [], are_plain=True)
    ids: set[int] = set()
    for start in range(0, len(parameters.tensors), _AT_ONCE):
        tensors = parameters.tensors[start : start + _AT_ONCE]
        grads = tensors if parameters.are_gradients else _grads_at_once(tensors)
        if grads is None:
            return None
        positions = range(start, start + len(grads))
        present: Iterable[int] = positions
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            present = [i for i, grad in zip(positions, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not set(map(type, grads)) <= {DTensor, torch.Tensor}:
            return None
        found = cast("list[torch.Tensor]", grads)
        locals_ = local_tensors(found)
        on_cpu = all(map(_is_cpu, locals_))
        if not (_are_dense(locals_) and (on_cpu or not any(map(_is_meta, locals_)))):
            return None
        ids.update(map(id, grads))
        shards.tensors += locals_
        shards.reaches += _known_reaches.of(found)
        shards.positions += present
        shards.are_plain &= on_cpu
    if len(ids) < len(shards) or any(r.fault or r.pending for r in shards.distinct_reaches):
        return None
    return shards


def _grads_at_once(tensors: Sequence[object]) -> list[object] | None:
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, tensors))):
        return None
    if any(map(hasattr, tensors, itertools.repeat("main_grad"))):
        return None
    grads = list(map(getattr, tensors, itertools.repeat("grad"), itertools.repeat(None)))
    if torch.Tensor in set(map(type, grads)):
        pairs = zip(tensors, grads, strict=True)
        if any(type(grad) is torch.Tensor and isinstance(owner, DTensor) for owner, grad in pairs):
            return None  # its placements are the parameter's
    return grads


def _are_dense(tensors: list[torch.Tensor]) -> bool:
    """Tell whether all are tensors of a known dtype, strided, contiguous and writable."""
    return (
        set(map(type, tensors)) <= {torch.Tensor}
        and _DTYPES.issuperset(map(_dtype_of, tensors))
        and set(map(_layout_of, tensors)) <= {torch.strided}
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_inference, tensors))
    )


_dtype_of = operator.attrgetter("dtype")
_layout_of = operator.attrgetter("layout")
_is_cpu = operator.attrgetter("is_cpu")
_nbytes_of = operator.attrgetter("nbytes")
_is_meta = operator.attrgetter("is_meta")
_known_reaches = KnownReaches()


def foretell_grad_shards(parameters: ParameterList) -> GradShards:
    """Return the parameters themselves, with the reaches that their own specs foretell."""
    tensors = [tensor for tensor in parameters.tensors if isinstance(tensor, torch.Tensor)]
    return GradShards(tensors, list(map(reach_of, tensors)), list(range(len(tensors))))


def _local_of(grad: torch.Tensor) -> torch.Tensor:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if type(local) is not torch.Tensor and hasattr(local, "wait"):
        local = local.wait()  # an AsyncCollectiveTensor: its collective has not been waited for
    return local


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
