"""What a clip tells: the norm, the coefficient, where they came from and what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.profiler import record_function

from .torch_private import profiler_is_running

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .lanes import RankSet

__all__ = ["STEPS", "ClipResult", "Copies", "NonfiniteGradient", "Stopwatch"]

STEPS = ("collect", "measure", "pack", "reduce", "finish", "scale")


@dataclass(frozen=True)
class Copies:
    """Transfers between host and device, collectives, and waits of the host, counted."""

    h2d: int = 0
    collectives: int = 0
    d2h: int = 0
    host_syncs: int = 0

    def __add__(self, other: Copies) -> Copies:
        return Copies(
            self.h2d + other.h2d,
            self.collectives + other.collectives,
            self.d2h + other.d2h,
            self.host_syncs + other.host_syncs,
        )

    def __sub__(self, other: Copies) -> Copies:
        return self + Copies(-other.h2d, -other.collectives, -other.d2h, -other.host_syncs)


@dataclass(frozen=True)
class NonfiniteGradient:
    """A gradient shard of this rank that makes the total norm NaN or infinite."""

    name: str
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class ClipResult:
    """The outcome of one clip on this rank.

    Norms and the coefficient are 0-dim, of the dtype of `total_norm`. Where a clip ran without the
    host, as with a `NormReducer` of a model on devices, all are on the accelerator; else all but
    `total_norm` are on the CPU.

    Attributes:
        total_norm: float32, or float64 if any gradient in the group is; on the CPU if all of this
            rank's gradients are, else on the accelerator. Equal on all ranks that read the same
            lanes.
        clip_coef: What the gradients were multiplied by, or what the step of `optimizer=` is to
            scale them by.
        local_norm: The norm of this rank's own shards, without Partial gradients, of which it has
            addends only.
        norms_by_rank_set: The norm over each rank set that contains this rank or a peer in its
            pp_group. Under `()` that of the gradients that this rank holds whole, if there are any;
            with a pp_group those are under the group's ranks, of all stages.
        nonfinite: This rank's gradients with NaN or infinite elements.
        replica_spread: Where a DTensor's own mesh has replicated dims, the largest relative
            difference of the norms of its copies, as far as this rank has gradients of them and no
            others in their lane; over 1e-3 a warning is logged once. A replica without a gradient
            differs by 1 from one with, since a step would part them. inf where elements of one
            only are NaN or infinite.
        copies: What this clip cost, exchanges at a group's first included.
        timings: Seconds of host time per step: collect, measure, pack, reduce, finish, scale. The
            trace of a torch profiler shows them as `hyper_parallel::collect` and so on.
        host_bytes_read: Bytes of gradients in host memory that this clip read.
        host_bytes_written: Bytes of them that it wrote.
        sampled_bytes_read: Bytes of them, besides, that it looked at to see whether norms taken by
            `NormBeforeOffload` still hold.
        num_early: This rank's gradients whose norm was taken by `NormBeforeOffload`.
        host_passes: Where that is attached: why other gradients were passed over after all, and how
            many of them.
        skips_step: Whether the next step of `optimizer=` does nothing, for `skip_nonfinite`.
    """

    total_norm: torch.Tensor
    clip_coef: torch.Tensor
    local_norm: torch.Tensor
    norms_by_rank_set: Mapping[RankSet, torch.Tensor]
    nonfinite: tuple[NonfiniteGradient, ...] = ()
    replica_spread: float = 0.0
    copies: Copies = field(default_factory=Copies)
    timings: Mapping[str, float] = field(default_factory=dict)
    host_bytes_read: int = 0
    host_bytes_written: int = 0
    sampled_bytes_read: int = 0
    num_early: int = 0
    host_passes: Mapping[str, int] = field(default_factory=dict)
    skips_step: bool = False


class Stopwatch:
    """Host seconds from lap to lap, and a range for each in the trace of a profiler that runs.

    A context: leaving it ends the range that an exception has left open.
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._ahead = iter(STEPS)
        self._range: record_function | None = None
        self._last = time.perf_counter()

    def __enter__(self) -> Stopwatch:
        self._open_range()
        return self

    def __exit__(self, *exception: object) -> None:
        self._close_range()

    def lap(self, step: str) -> None:
        """Store the seconds since the last lap under `step`, one of STEPS; the next one begins."""
        now = time.perf_counter()
        self.laps[step] = now - self._last
        self._last = now
        self._close_range()
        self._ahead = iter(STEPS[STEPS.index(step) + 1 :])
        self._open_range()

    def _open_range(self) -> None:
        step = next(self._ahead, None)
        # A range costs microseconds even if nobody looks.
        if step is not None and profiler_is_running():
            self._range = record_function(f"hyper_parallel::{step}")
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
