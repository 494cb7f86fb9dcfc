"""Where a clip's time goes and what it communicates, seen from the operators that it calls.

Works on anyone's code: operators are met below DTensor, where tensors are this rank's shards. Our
own kernels are no operators; they are timed where they are called.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.kernels import host

__all__ = ["Seen", "clock_of", "probe"]

# An operator on more host elements than this is a pass over gradients; on fewer it is bookkeeping,
# such as the norm of all parameters' norms.
_PASS_NUMEL = 4096
_COLLECTIVES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")


@dataclass
class Seen:
    """What one clip on this rank did.

    Attributes:
        norm_s: Seconds in passes over host gradients, those that scale aside.
        scale_s: Seconds in passes that change them in place.
        collectives: Number of them.
        payload_bytes: Bytes that this rank gave to them.
        h2d, d2h, h2d_bytes, d2h_bytes: Copies between host and device.
    """

    norm_s: float = 0.0
    scale_s: float = 0.0
    collectives: int = 0
    payload_bytes: int = 0
    copies: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("h2d", "d2h", "h2d_bytes", "d2h_bytes"), 0)
    )


@contextlib.contextmanager
def probe(clock: Callable[[], float]) -> Iterator[Seen]:
    """Watch this thread's operators; `clock` gives seconds."""
    seen = Seen()

    def timed(name: str, attribute: str) -> Any:
        function = getattr(host, name)

        def call(*args: Any, **options: Any) -> Any:
            start = clock()
            try:
                return function(*args, **options)
            finally:
                setattr(seen, attribute, getattr(seen, attribute) + clock() - start)

        return mock.patch.object(host, name, call)

    with timed("partial_norms", "norm_s"), timed("scale_", "scale_s"), _Watch(seen, clock):
        yield seen


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Seen, clock: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._clock = clock

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's turn; its operators on shards come back here
        start = self._clock()
        result = func(*args, **(kwargs or {}))
        self._note(func, args, result, self._clock() - start)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: Any, seconds: float) -> None:
        name = func.__name__.split(".")[0]
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            if any(word in name for word in _COLLECTIVES):
                self._seen.collectives += 1
                self._seen.payload_bytes += sum(map(_num_bytes, given[-1:]))
            return
        if name in ("_to_copy", "copy_", "_local_scalar_dense"):
            self._note_copy(name, given, made)
        if sum(tensor.numel() for tensor in given if tensor.is_cpu) > _PASS_NUMEL:
            if name.endswith("_"):
                self._seen.scale_s += seconds
            else:
                self._seen.norm_s += seconds

    def _note_copy(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        source = given[-1] if name == "copy_" else given[0]
        from_host = source.is_cpu
        to_host = (given[0] if name == "copy_" else made[0]).is_cpu if made else True
        if from_host != to_host:
            kind = "h2d" if from_host else "d2h"
            self._seen.copies[kind] += 1
            self._seen.copies[f"{kind}_bytes"] += _num_bytes(source)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def clock_of(num_threads: int) -> Callable[[], float]:
    """Return the clock for host passes: CPU time is blind to the ranks that share a core.

    It counts this thread only, so that several threads need the time of day.
    """
    return time.thread_time if num_threads == 1 else time.perf_counter
