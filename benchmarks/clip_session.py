"""What a rank does: tries every method on one case, then times those that work, in turns."""

from __future__ import annotations

import functools
import random
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from clip_layouts import Case, load_layout
from pass_probe import Seen, clock_of, probe
from peers import METHODS, Adapter
from rank_launcher import Say
from true_norm import true_norm

from hyper_parallel.kernels import host
from hyper_parallel.testing import simnpu

__all__ = ["NotAlikeError", "Outcome", "Plan", "Sample", "SessionResult", "run_session"]

_NUM_PROBES = 3
_SIMULATOR_COUNTS = ("h2d", "d2h", "h2d_bytes", "d2h_bytes", "collectives", "host_syncs")


class NotAlikeError(RuntimeError):
    """A method worked on some ranks and failed on others: the groups cannot be trusted any more."""


@dataclass(frozen=True)
class Plan:
    """What all ranks measure.

    Attributes:
        methods: Names in `peers.METHODS`.
        device: sim, cpu, cuda or npu.
        latencies: Arguments of `simnpu.configure`.
        trace: File for rank 0's profile of one clip per method.
    """

    layout: str
    scale: float
    methods: Sequence[str]
    device: str
    repeats: int
    max_norm: float
    latencies: dict[str, float] = field(default_factory=dict)
    trace: str | None = None

    @property
    def device_type(self) -> str:
        """Of the meshes."""
        return "npu" if self.device == "sim" else self.device


@dataclass(frozen=True)
class Sample:
    """One timed clip on this rank; times of day are of a clock that the ranks share."""

    start_s: float
    end_s: float
    cpu_s: float
    counts: dict[str, int] | None  # None: no simulator that counts


@dataclass
class Outcome:
    """What one method did on this rank."""

    error: str | None = None
    norm: float = 0.0
    true_norm: float = 0.0
    post_clip_norm: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    scalar_paths: list[tuple[float, float]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)


@dataclass(frozen=True)
class SessionResult:
    """What a rank measured.

    Attributes:
        outcomes: By method.
        limits_s: Seconds, by the same clock, of the fastest known read, and read and write, of all
            gradients.
    """

    outcomes: dict[str, Outcome]
    limits_s: dict[str, float]


def run_session(say: Say, plan: Plan) -> SessionResult:
    """Return an outcome per method.

    Ranks: all of the default group.

    Raises:
        NotAlikeError: See there; `say` has told the method.
    """
    num_threads = host.num_threads()
    torch.set_num_threads(num_threads)
    everyone = dist.new_group(backend="gloo")
    say("making the parameters")
    case = Case(load_layout(plan.layout, plan.scale), plan.device_type, plan.max_norm)
    reference = true_norm(case.local_grads, case.counted, everyone)
    outcomes: dict[str, Outcome] = {}
    working: dict[str, Adapter] = {}
    if plan.device == "sim":
        simnpu.configure(**dict[str, Any](plan.latencies))
    for name in plan.methods:
        say(name)
        outcome = outcomes[name] = Outcome(true_norm=reference)
        adapter = _try(name, case, outcome, everyone)
        if adapter is not None:
            working[name] = adapter
    say("measuring")
    clock = clock_of(num_threads)
    turns = random.Random(0)  # the same order on all ranks
    for turn in range(plan.repeats):
        for name in turns.sample(list(working), len(working)):
            say(name)
            outcomes[name].samples.append(_time(working[name], everyone, clock, plan))
        say(f"measured {turn + 1}/{plan.repeats}")
    for name, adapter in working.items():
        say(name)
        outcomes[name].seen += [_watch(adapter, everyone, clock) for _ in range(_NUM_PROBES)]
        outcomes[name].scalar_paths += _time_scalar_path(adapter, everyone, plan.repeats)
    limits_s = _measure_limits(case, everyone, clock)
    if plan.trace is not None:
        _write_trace(working, plan.trace, everyone)
    return SessionResult(outcomes, limits_s)


def _try(name: str, case: Case, outcome: Outcome, everyone: dist.ProcessGroup) -> Adapter | None:
    """Clip once; fill in norms, or the error, alike on all ranks."""
    adapter: Adapter | None = None
    case.restore()
    try:
        adapter = METHODS[name](case)
        adapter.restore()
        outcome.norm = float(adapter.clip())
        adapter.finish()
    except Exception as error:
        outcome.error = describe(error)
    errors: list[str | None] = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(errors, outcome.error, group=everyone)
    failed = [error is not None for error in errors]
    if any(failed) != all(failed):
        first = next(error for error in errors if error is not None)
        raise NotAlikeError(f"{sum(failed)} of {len(errors)} ranks failed: {first}")
    if adapter is None or outcome.error is not None:
        return None
    outcome.post_clip_norm = true_norm(adapter.local_grads, case.counted, everyone)
    return adapter


def describe(error: Exception) -> str:
    """Return an error as one line; of one without words, the line of code that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = traceback.extract_tb(error.__traceback__)
    text = lines[0] if lines else (frames[-1].line or "" if frames else "")
    return f"{type(error).__name__}: {text}"[:300]


def _time(adapter: Adapter, everyone: dist.ProcessGroup, clock: Any, plan: Plan) -> Sample:
    """Time one clip, from when all ranks have come to a barrier."""
    adapter.restore()
    if plan.device == "sim":
        simnpu.reset_counters()
    dist.barrier(group=everyone)
    start, cpu_start = time.perf_counter(), clock()
    float(adapter.clip())
    end, cpu_end = time.perf_counter(), clock()
    counts = None
    if plan.device == "sim":
        counters = simnpu.counters()
        counts = {count: counters[count] for count in _SIMULATOR_COUNTS}
    adapter.finish()
    return Sample(start, end, cpu_end - cpu_start, counts)


def _watch(adapter: Adapter, everyone: dist.ProcessGroup, clock: Any) -> Seen:
    adapter.restore()
    dist.barrier(group=everyone)
    with probe(clock) as seen:
        adapter.clip()
    adapter.finish()
    return seen


def _time_scalar_path(
    adapter: Adapter, everyone: dist.ProcessGroup, repeats: int
) -> list[tuple[float, float]]:
    """Time what follows the partial norms, from when all ranks have come so far: start and end."""
    adapter.before_scalar_path = functools.partial(dist.barrier, group=everyone)
    paths: list[tuple[float, float]] = []
    for _ in range(repeats):
        adapter.restore()
        adapter.clip_and_time_scalar_path()
        adapter.finish()
        if adapter.scalar_path is None:
            break
        paths.append(adapter.scalar_path)
    adapter.before_scalar_path = lambda: None
    return paths


def _measure_limits(case: Case, everyone: dist.ProcessGroup, clock: Any) -> dict[str, float]:
    """Time the fastest passes over all gradients that are known, on all ranks at once."""
    table = host.pack(case.local_grads)
    limits = {}
    for name, limit in {"read": host.read, "read_and_write": host.read_and_write}.items():
        taken = []
        for _ in range(_NUM_PROBES):
            case.restore()
            dist.barrier(group=everyone)
            start = clock()
            limit(table)
            taken.append(clock() - start)
        limits[name] = statistics.median(taken)
    return limits


def _write_trace(working: dict[str, Adapter], path: str, everyone: dist.ProcessGroup) -> None:
    """Profile one clip of each method; rank 0 writes the trace, for chrome://tracing."""
    profile: Any = functools.partial(
        torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU]
    )
    with profile() as profiler:
        for name, adapter in working.items():
            adapter.restore()
            dist.barrier(group=everyone)
            with torch.profiler.record_function(f"clip by {name}"):
                adapter.clip()
            adapter.finish()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)
