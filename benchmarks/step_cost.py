"""What clipping adds to an optimizer step on gradients in host memory.

One rank trains with FSDP2's CPU offload on the simulated NPU. After each backward pass the clip and
the step of a fused AdamW are timed: without a clip; with norms taken before the offload and the
scaling left to the step; with one pass over the gradients for the norm; and with a second pass to
scale them. The ways take turns in random order, and each is compared with the step without a clip
of the same round. The norms of all ways must agree.

    python benchmarks/step_cost.py                     # 64 Mi elements, a few minutes on 2 cores
    python benchmarks/step_cost.py --json F
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from machine import describe_machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from hyper_parallel import ClipResult, NormBeforeOffload, NormReducer
from hyper_parallel.testing import simnpu

NO_CLIP = "no clip"
WAYS = {
    NO_CLIP: "",
    "norm before offload, clip in the step": "early optimizer",
    "norm by a host pass, clip in the step": "optimizer",
    "norm by a host pass, scaled by another": "passes",
}
MAX_NORM = 1e-3  # every step clips
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One way to clip, against the step without."""

    way: str
    median_ms: float  # of clip and step
    added_percent: float  # mean over rounds
    added_percent_low: float  # 95 % confidence interval of it, by resampling rounds
    added_percent_high: float
    host_bytes_read: int
    host_bytes_written: int
    sampled_bytes_read: int


class Step:
    """A model, its optimizer and its clip."""

    def __init__(self, numel: int, num_layers: int) -> None:
        width = max(8, round((numel / num_layers) ** 0.5))
        torch.manual_seed(0)
        mesh = init_device_mesh("npu", (1,))
        layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
        for layer in layers:
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
        self.model = nn.Sequential(*layers)
        fully_shard(self.model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        self.numel = sum(parameter.numel() for parameter in layers[0].parameters()) * num_layers
        self.batch = torch.randn(2, width).to("npu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.reducer = NormReducer(self.model)
        self.early = NormBeforeOffload(self.model)

    def run(self, way: str) -> tuple[float, ClipResult | None]:
        """Return seconds of clip and step, and what the clip says; the backward is not timed."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        how = WAYS[way]
        if "early" not in how:
            self.early.invalidate()
        optimizer = self.optimizer if "optimizer" in how else None
        result = None
        start = time.perf_counter()
        if how:
            result = self.reducer.clip_(self.model.parameters(), MAX_NORM, optimizer=optimizer)
        self.optimizer.step()
        return time.perf_counter() - start, result


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    simnpu.install()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group("hccl", init_method=store, rank=0, world_size=1)
        step = Step(options.numel, options.layers)
        rows = measure(step, options.rounds, random.Random(0))
        dist.destroy_process_group()
    for row in rows:
        print(
            f"{row.way:40} {row.median_ms:9.1f} ms  {row.added_percent:+7.2f} % "
            f"[{row.added_percent_low:+.2f}, {row.added_percent_high:+.2f}]  "
            f"read {row.host_bytes_read:,} written {row.host_bytes_written:,} "
            f"sampled {row.sampled_bytes_read:,} bytes"
        )
    conditions = {
        **describe_machine(),
        "threads": options.threads,
        "numel": step.numel,
        "dtype": "float32",
        "rounds": options.rounds,
        "device": "simulated NPU",
    }
    print(json.dumps(conditions), file=sys.stderr)
    if options.json:
        report = {"conditions": conditions, "rows": [dataclasses.asdict(row) for row in rows]}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters in all")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", help="file to write")
    return parser.parse_args()


def measure(step: Step, num_rounds: int, source: random.Random) -> list[Row]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    results: dict[str, ClipResult] = {}
    for round_number in range(-1, num_rounds):
        order = list(WAYS)
        source.shuffle(order)
        norms = set()
        for way in order:
            elapsed, result = step.run(way)
            if round_number >= 0:  # before that buffers and the optimizer's state are made
                seconds[way].append(elapsed)
            if result is not None:
                results[way] = result
                norms.add(round(result.total_norm.item(), 12))
        if max(norms) > min(norms) * 1.01:  # parameters move a little from way to way
            raise SystemExit(f"the ways disagree on the norm: {sorted(norms)}")
        print(f"round {round_number}", file=sys.stderr)
    return [row_of(way, seconds, results.get(way), source) for way in WAYS]


def row_of(
    way: str,
    seconds: dict[str, list[float]],
    result: ClipResult | None,
    source: random.Random,
) -> Row:
    added = [
        100 * (own / without - 1)
        for own, without in zip(seconds[way], seconds[NO_CLIP], strict=True)
    ]
    low, high = confidence_interval(added, source)
    return Row(
        way,
        1e3 * statistics.median(seconds[way]),
        statistics.fmean(added),
        low,
        high,
        result.host_bytes_read if result else 0,
        result.host_bytes_written if result else 0,
        result.sampled_bytes_read if result else 0,
    )


def confidence_interval(values: Sequence[float], source: random.Random) -> tuple[float, float]:
    """Return the middle 95 % of means of resampled values."""
    means = sorted(
        statistics.fmean(source.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
    )
    return means[NUM_RESAMPLES // 40], means[-NUM_RESAMPLES // 40]


if __name__ == "__main__":
    main()
