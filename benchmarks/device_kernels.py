"""Time the device kernels against torch's multi-tensor operators and the speed of a copy.

    python benchmarks/device_kernels.py [--device cuda] [--mib 1024] [--save]

One row per kernel, dtype and shape of model: median, 20th and 80th percentile of the device's own
clock, bytes moved, GiB/s, and what part that is of the speed at which the device copies (read and
write together). Each result is compared with float64 before it is timed. With --save the table goes
to benchmarks/results, under the device's name.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

import torch
from providers import FOREACH_MUL_, FOREACH_NORM

from hyper_parallel.kernels import reference
from hyper_parallel.kernels import triton as kernels

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUM_SMALL = 900
COPY_NUMEL = 1 << 28
MAX_ERROR = 2.0**-43


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    provider: str
    case: str
    dtype: str
    num_tensors: int
    mib: float
    median_us: float
    p20_us: float
    p80_us: float
    gib_per_s: float
    of_copy: float


def tensors_of(shape: str, dtype: torch.dtype, num_bytes: int, device: str) -> list[torch.Tensor]:
    """Return gradients: one, or many of sizes that differ a hundredfold."""
    numel = num_bytes // dtype.itemsize
    if shape == "one":
        return [torch.randn(numel, device=device).to(dtype)]
    weights = [1.0 + 99.0 * (i * 37 % NUM_SMALL) / NUM_SMALL for i in range(NUM_SMALL)]
    unit = numel / sum(weights)
    sizes = [max(1, int(weight * unit)) for weight in weights]
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def time_us(run: Callable[[], object], device: str, repeats: int) -> tuple[float, float, float]:
    """Return median, 20th and 80th percentile by the device's clock."""
    module = torch.get_device_module(device)
    for _ in range(3):
        run()
    pairs = []
    for _ in range(repeats):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    module.synchronize()
    times = sorted(1e3 * start.elapsed_time(end) for start, end in pairs)
    return statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5]


def copy_gib_per_s(device: str, numel: int, repeats: int) -> float:
    """Return at what rate the device copies: bytes read and bytes written."""
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    median, *_ = time_us(lambda: target.copy_(source), device, repeats)
    return 2 * source.nbytes / 2**30 / (median * 1e-6)


def verify(tensors: Sequence[torch.Tensor], launcher: kernels.Launcher) -> None:
    """Compare with float64.

    Raises:
        RuntimeError: If the kernels are wrong.
    """
    rows = launcher.partial_norms(tensors, 2).cpu()
    [measured] = kernels.totals_of_ranges(rows, [(0, len(rows))], 2).values
    right = sum(reference.pow_sum64(tensor.cpu(), 2) for tensor in tensors)
    if not abs(measured / right - 1) < MAX_ERROR:
        raise RuntimeError(f"the sum of squares is {measured}, and should be {right}")


def runs_of(
    tensors: list[torch.Tensor], launcher: kernels.Launcher, device: str
) -> dict[tuple[str, str], tuple[int, Callable[[], object]]]:
    """Return, by provider and case, how often the memory is passed over, and what is timed."""
    one = torch.full((1,), 0.999, device=device)
    return {
        ("hyper_parallel", "norm"): (1, partial(launcher.partial_norms, tensors, 2)),
        ("hyper_parallel", "max"): (1, partial(launcher.partial_norms, tensors, 0)),
        ("hyper_parallel", "scale"): (2, partial(launcher.scale_, tensors, one)),
        ("torch", "norm"): (1, partial(FOREACH_NORM, tensors, 2)),
        ("torch", "max"): (1, partial(FOREACH_NORM, tensors, float("inf"))),
        ("torch", "scale"): (2, partial(FOREACH_MUL_, tensors, one[0])),
    }


def measure(device: str, num_bytes: int, repeats: int, copy_rate: float) -> Iterator[Row]:
    """Yield the table's rows."""
    for name, dtype in DTYPES.items():
        for shape in ("one", "many"):
            tensors = tensors_of(shape, dtype, num_bytes, device)
            moved = sum(tensor.nbytes for tensor in tensors)
            launcher = kernels.Launcher(tensors, [0] * len(tensors), tensors[0].device)
            verify(tensors, launcher)
            runs = runs_of(tensors, launcher, device)
            for (provider, case), (passes, run) in runs.items():
                median, p20, p80 = time_us(run, device, repeats)
                rate = passes * moved / 2**30 / (median * 1e-6)
                yield Row(
                    provider,
                    f"{case}-{shape}",
                    name,
                    len(tensors),
                    passes * moved / 2**20,
                    median,
                    p20,
                    p80,
                    rate,
                    rate / copy_rate,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default=torch.accelerator.current_accelerator())
    parser.add_argument("--mib", type=float, default=1024.0, help="bytes of each model, in MiB")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    options = parser.parse_args(arguments)
    if options.device is None or torch.device(options.device).type == "cpu":
        sys.exit("there is no accelerator here: this measures kernels for device memory")
    device = str(options.device)
    if not kernels.is_available(torch.device(device).type):
        sys.exit(f"Triton is not installed, or drives no {device}")
    name = torch.get_device_module(device).get_device_name()
    num_bytes = int(options.mib * 2**20)
    copy_rate = copy_gib_per_s(device, min(COPY_NUMEL, num_bytes // 4), options.repeats)
    print(f"{name}, torch {torch.__version__}: copies {copy_rate:.0f} GiB/s")
    rows = []
    for row in measure(device, num_bytes, options.repeats, copy_rate):
        rows.append(row)
        print(
            f"{row.provider:15} {row.case:11} {row.dtype} {row.num_tensors:4} tensors "
            f"{row.mib:8.1f} MiB {row.median_us:10.1f} us {row.gib_per_s:8.1f} GiB/s "
            f"{row.of_copy:5.2f} of copy"
        )
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"device_kernels_{re.sub(r'[^A-Za-z0-9]+', '_', name)}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(field.name for field in fields(Row)), "device", "torch"])
            writer.writerows([*astuple(row), name, torch.__version__] for row in rows)
        print(f"saved to {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
