"""The only place that touches names which torch does not promise to keep.

Each function says which torch versions it was read in, so that a rename upstream is mended here.
"""

from __future__ import annotations

import datetime
import itertools
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "KeyValueStore",
    "all_gather_rows",
    "foreach_mul_",
    "group_store",
    "group_timeout",
    "init_dry_run",
    "is_sharded",
    "is_stepping",
    "local_tensors",
    "not_compiled",
    "num_stored_bytes",
    "profiler_is_running",
    "reduce_scatter_sum",
    "specs",
    "takes_grad_scale",
    "versions_of",
]


class KeyValueStore(Protocol):
    """What we use of `torch.distributed.Store`, whose class torch's own stubs do not export."""

    timeout: datetime.timedelta

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait for it if need be."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are set."""

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        """Wait for all keys; RuntimeError at the timeout."""


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `torch.compile` of a caller out of `function`: it talks to stores and process groups.

    As `torch.compiler.disable`, but dynamo is not imported before the first call.
    """
    return _disable_dynamo(function)


def is_sharded(placement: Placement) -> bool:
    """Tell whether a mesh dim with this placement holds different elements on each rank.

    `_StridedShard` (FSDP2 over TP or EP) is a `Shard` in torch 2.9 and is none in 2.13, where its
    `is_shard()` is False too.
    """
    return isinstance(placement, (Shard, _StridedShard))


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the shards, without `to_local`'s microseconds and autograd node (2.9 to 2.13).

    Of what is no DTensor, itself.
    """
    return list(map(getattr, tensors, itertools.repeat("_local_tensor"), tensors))


def specs(tensors: Iterable[torch.Tensor]) -> list[object]:
    """Return each one's mesh and placements, as one object (torch 2.9 to 2.13), or None."""
    return list(map(getattr, tensors, itertools.repeat("_spec"), itertools.repeat(None)))


_version = operator.attrgetter("_version")


def all_gather_rows(output: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather the equally long `row` of every rank into `output`, in group order.

    `all_gather_into_tensor` until torch 2.12, deprecated for `all_gather_single` in 2.13.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, row, group=group)


def reduce_scatter_sum(output: torch.Tensor, chunk: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `chunk` over ranks and return this rank's equal share of it in `output`.

    `reduce_scatter_tensor` until torch 2.12, deprecated for `reduce_scatter_single` in 2.13.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, chunk, group=group)


def group_store(group: dist.ProcessGroup) -> KeyValueStore:
    """Return the key-value store that the ranks of `group` share (torch 2.9 to 2.13)."""
    return cast("KeyValueStore", _get_process_group_store(group))


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Return the timeout of the group's backend for `device`, else that of its store."""
    options = getattr(group._get_backend(device), "options", None)  # noqa: SLF001
    timeout = getattr(options, "_timeout", None) or group_store(group).timeout
    assert isinstance(timeout, datetime.timedelta)  # noqa: S101
    return timeout


def init_dry_run(rank: int, world_size: int) -> None:
    """Start torch.distributed as one of many ranks that do not exist: its collectives do nothing.

    FakeProcessGroup, which torch registers as a backend for its own tests only (2.9 to 2.13).
    """
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    create = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    if "fake" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "fake", lambda _store, rank, size, _timeout: create(rank, size), devices=["cpu"]
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=HashStore())


def versions_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return how often each was written in place, as autograd counts it (2.9 to 2.13)."""
    return tuple(map(_version, tensors))


def num_stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements, of a sparse COO tensor those it stores (2.9 to 2.13)."""
    stored = tensor._values() if tensor.layout == torch.sparse_coo else tensor  # noqa: SLF001
    return stored.nbytes


def profiler_is_running() -> bool:
    """Tell whether a range would be seen by anybody (torch 2.9 to 2.13); takes 0.1 us."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]  # noqa: SLF001


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply tensors of one device and dtype in place, in one kernel where there is one."""
    torch._foreach_mul_(list(tensors), factor)


def takes_grad_scale(optimizer: object) -> bool:
    """Tell whether a step divides gradients by the optimizer's `grad_scale`, if that is set.

    The mark by which `torch.amp.GradScaler` knows such optimizers (2.9 to 2.13); but a parameter
    group of theirs may still say `fused=False`.
    """
    return bool(
        isinstance(optimizer, torch.optim.Optimizer)
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused", True) for group in optimizer.param_groups)
    )


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether this thread is inside the optimizer's `step()`, hooks and closure included.

    `Optimizer` wraps the class's `step` in a function that runs the hooks (2.9 to 2.13). Compiled,
    its frame shows no variables; that of `step` itself does.
    """
    code = getattr(type(optimizer).step, "__code__", None)
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        is_step = frame.f_code is code or frame.f_code.co_name == "step"
        if is_step and frame.f_locals.get("self") is optimizer:
            return True
    return False
