"""Host kernels and torch's CPU operators against the limits of this machine's memory.

For every dtype, layout of tensors and number of threads: the norm, the inf norm, the exact norm
and the scaling of all tensors, by us and by torch, as a fraction of the fastest read (or read and
write) of the same memory that is known. The limit is measured before and after every sample, in
this process; figures are medians of such ratios, with providers in random order. Every result is
verified before it is timed.

    python benchmarks/host_bandwidth.py                      # a table, within 8 minutes on 2 cores
    python benchmarks/host_bandwidth.py --json F --plot F
    python benchmarks/host_bandwidth.py --python             # the Python around the kernels
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import torch
from providers import (
    OURS,
    PROVIDERS,
    Provider,
    TensorSet,
    exact_inf_norm,
    exact_norm,
    validate_exact_sum,
    verify_scaling,
)
from python_walk import measure_python_walk
from shard_sizes import LAYOUTS, sizes_of

from hyper_parallel.kernels import host

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Each call gets other memory than the one before, so that it is cold, as gradients are that came
# from a device.
COLD_BYTES = 512 << 20


@dataclass(frozen=True)
class Row:
    """One provider in one cell of the table."""

    op: str
    dtype: str
    layout: str
    provider: str
    threads: int
    ratio_to_limit: float
    median_ms: float
    p20_ms: float
    p80_ms: float
    gib_per_s: float
    rel_error: float


class Memory:
    """Sets of equal tensors that take turns."""

    def __init__(self, base: torch.Tensor, sizes: Sequence[int]) -> None:
        set_bytes = sum(sizes) * base.element_size()
        num_sets = max(2, math.ceil(COLD_BYTES / set_bytes)) if set_bytes > 1 << 20 else 2
        self.num_bytes = set_bytes
        self._sets = [self._make(base, sizes) for _ in range(num_sets)]
        self._turn = 0

    @staticmethod
    def _make(base: torch.Tensor, sizes: Sequence[int]) -> TensorSet:
        tensors, start = [], 0
        for size in sizes:
            start = start if start + size <= base.numel() else 0
            tensors.append(base[start : start + size].clone())
            start += size
        return TensorSet(tensors, host.pack(tensors))

    def next(self) -> TensorSet:
        self._turn = (self._turn + 1) % len(self._sets)
        return self._sets[self._turn]


def main() -> None:
    """Run what the command line asks for."""
    options = parse_arguments()
    if options.python:
        print(measure_python_walk(options.repetitions))
        return
    started = time.monotonic()
    rows: list[Row] = []
    limits: list[dict[str, object]] = []
    num_cells = len(options.threads) * len(DTYPES) * len(LAYOUTS)
    for dtype_name, dtype in DTYPES.items():
        base = torch.randn((128 << 20) // options.shrink, generator=seeded()).to(dtype)
        for layout in LAYOUTS:
            memory = Memory(base, sizes_of(layout, options.shrink))
            validate_exact_sum(memory.next())
            for threads in options.threads:
                cell = Cell(dtype_name, layout, threads, memory)
                rows += cell.measure(options.repetitions)
                limits.append(cell.limits())
                num_done = len(limits)
                seconds = time.monotonic() - started
                log(
                    f"{num_done}/{num_cells} cells, {seconds:.0f} s, "
                    f"{seconds / num_done * (num_cells - num_done):.0f} s to go"
                )
    print_table(rows)
    report = {"rows": [asdict(row) for row in rows], "conditions": conditions(options, limits)}
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    most = host.num_threads()
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--plot", help="draw ratios to this file (needs matplotlib)")
    parser.add_argument("--python", action="store_true", help="measure the Python walk instead")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, most}))
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes, to try things out")
    return parser.parse_args()


def seeded() -> torch.Generator:
    """Return a generator that draws the same numbers in every run."""
    return torch.Generator().manual_seed(3)


class Cell:
    """One dtype, layout and number of threads."""

    def __init__(self, dtype: str, layout: str, threads: int, memory: Memory) -> None:
        self._dtype = dtype
        self._layout = layout
        self._threads = threads
        self._memory = memory
        # CPU time is blind to neighbours on the machine, but adds up over threads.
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._limit_seconds: dict[str, list[float]] = {"read": [], "read_and_write": []}

    def measure(self, repetitions: int) -> list[Row]:
        """Return a row for each operation and provider."""
        os.environ["HYPER_PARALLEL_NUM_THREADS"] = str(self._threads)
        torch.set_num_threads(self._threads)
        rows: list[Row] = []
        for op, providers in PROVIDERS.items():
            chosen = [p for p in providers if self._dtype != "float32" or "dtype=" not in p.name]
            errors = {provider.name: self._verify(op, provider) for provider in chosen}
            samples: dict[str, list[tuple[float, float]]] = {p.name: [] for p in chosen}
            for _ in range(repetitions):
                for provider in random.sample(chosen, len(chosen)):
                    samples[provider.name].append(self._sample(op, provider))
            rows += [self._row(op, name, samples[name], errors[name]) for name in samples]
        return rows

    def limits(self) -> dict[str, object]:
        """Return what the limits of this cell were."""
        found: dict[str, object] = {
            "dtype": self._dtype,
            "layout": self._layout,
            "threads": self._threads,
        }
        for name, seconds in self._limit_seconds.items():
            num_bytes = self._memory.num_bytes * (2 if name == "read_and_write" else 1)
            found[f"{name}_gib_per_s"] = num_bytes / statistics.median(seconds) / 2**30
        return found

    def _verify(self, op: str, provider: Provider) -> float:
        """Return the relative error of the result; ours must be right."""
        if provider.value is None:
            return verify_scaling(provider, self._memory.next().tensors[0])
        tensors = self._memory.next()
        value = provider.value(provider.run(tensors))
        exact = exact_inf_norm(tensors) if op == "inf_norm" else exact_norm(tensors)
        error = abs(float(Fraction(value) / exact - 1)) if math.isfinite(value) else math.inf
        bound = {"norm": 2.0**-42, "inf_norm": 0.0, "exact_norm": 2.0**-52}[op]
        if provider.name == OURS and error > bound:
            raise AssertionError(f"{op} of {self._dtype} {self._layout} is off by {error}")
        return error

    def _sample(self, op: str, provider: Provider) -> tuple[float, float]:
        """Return seconds taken, and seconds of the limit, measured before and after."""
        limit_name = "read_and_write" if op == "scale" else "read"
        limit = host.read_and_write if op == "scale" else host.read
        before = self._time(lambda s: limit(s.table))
        taken = self._time(provider.run)
        after = self._time(lambda s: limit(s.table))
        self._limit_seconds[limit_name] += [before, after]
        return taken, (before + after) / 2

    def _time(self, run: Callable[[TensorSet], object]) -> float:
        tensors = self._memory.next()
        start = self._clock()
        run(tensors)
        return self._clock() - start

    def _row(self, op: str, name: str, samples: list[tuple[float, float]], error: float) -> Row:
        taken = sorted(seconds for seconds, _ in samples)
        median = statistics.median(taken)
        num_bytes = self._memory.num_bytes * (2 if op == "scale" else 1)
        return Row(
            op=op,
            dtype=self._dtype,
            layout=self._layout,
            provider=name,
            threads=self._threads,
            ratio_to_limit=statistics.median(limit / seconds for seconds, limit in samples),
            median_ms=median * 1e3,
            p20_ms=taken[round(0.2 * (len(taken) - 1))] * 1e3,
            p80_ms=taken[round(0.8 * (len(taken) - 1))] * 1e3,
            gib_per_s=num_bytes / median / 2**30,
            rel_error=error,
        )


def conditions(options: argparse.Namespace, limits: list[dict[str, object]]) -> dict[str, object]:
    """Return what the figures depend on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "instruction_set": host.instruction_sets()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "repetitions": options.repetitions,
        "shrink": options.shrink,
        "clock": "CPU time of the process at one thread, wall time at several",
        "memory": f"sets of tensors of {COLD_BYTES >> 20} MiB or more in all take turns: cold",
        "ours": "called with a packed table; packing it is part of --python",
        "limits": limits,
        "load_average": os.getloadavg(),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Print one line per provider and cell."""
    print(
        f"{'op':10s} {'dtype':8s} {'layout':9s} {'thr':>3s} {'provider':35s} "
        f"{'of limit':>8s} {'median':>9s} {'p20':>9s} {'p80':>9s} {'GiB/s':>6s} {'error':>8s}"
    )
    for r in rows:
        print(
            f"{r.op:10s} {r.dtype:8s} {r.layout:9s} {r.threads:3d} {r.provider:35s} "
            f"{r.ratio_to_limit:8.2f} {r.median_ms:6.1f} ms {r.p20_ms:6.1f} ms "
            f"{r.p80_ms:6.1f} ms {r.gib_per_s:6.1f} {r.rel_error:8.1e}"
        )


def plot(rows: Sequence[Row], path: str) -> None:
    """Draw ours and the best of torch's as bars, a panel for each operation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(PROVIDERS), 1, figsize=(14, 12), sharex=True)
    cells = sorted({(r.threads, r.dtype, r.layout) for r in rows})
    places = range(len(cells))
    for panel, op in zip(panels, PROVIDERS, strict=True):
        ours, best = {}, dict.fromkeys(cells, 0.0)
        for r in rows:
            if r.op == op and r.provider == OURS:
                ours[r.threads, r.dtype, r.layout] = r.ratio_to_limit
            elif r.op == op:
                cell = (r.threads, r.dtype, r.layout)
                best[cell] = max(best[cell], r.ratio_to_limit)
        panel.bar([x - 0.2 for x in places], [ours[c] for c in cells], 0.4, label=OURS)
        panel.bar([x + 0.2 for x in places], [best[c] for c in cells], 0.4, label="torch, best")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_ylabel(f"{op}\nof the limit")
    panels[0].legend()
    labels = [f"{dtype} {layout} x{threads}" for threads, dtype, layout in cells]
    panels[-1].set_xticks(list(places), labels, rotation=90)
    figure.tight_layout()
    figure.savefig(path)


def log(text: str) -> None:
    """Say how far we are, apart from the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
