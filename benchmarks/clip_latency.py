"""The whole clip, by this repository and by its peers: same gradients, same groups, same run.

Ranks are forked. On the simulated NPU (`--device sim`) copies and collectives are counted and take
injected latencies on top of what gloo really takes; CPU times are real. Every method is tried
first, and what it raises is shown as its own word on the layout; peers that need a group that
reduces CPU tensors get one, and are listed with `+gloo` behind their name. Those that work take
turns, from a barrier to the end of the slowest rank, and their norms are checked.

    python benchmarks/clip_latency.py --layout multi_component --ranks 8 --device sim
    python benchmarks/clip_latency.py --layout kimi_k2 --scale 0.0005 --json F --plot F.png
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from clip_layouts import LAYOUT_NAMES, load_layout
from clip_rows import Row, build_row
from clip_session import Outcome, Plan, SessionResult, run_session
from clip_table import print_table
from latency_constants import injected_latencies
from machine import describe_machine
from peers import METHODS
from rank_launcher import RankFailedError, run_ranks
from true_norm import WRONG_ABOVE

from hyper_parallel.testing import simnpu

_BACKENDS = {"sim": "hccl", "npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
_GLOO_TOO = {
    "sim": "cpu:gloo,npu:hccl",
    "npu": "cpu:gloo,npu:hccl",
    "cuda": "cpu:gloo,cuda:nccl",
}
_MAX_NORM = 1.0
_PLUS_GLOO = "+gloo"
_NOT_INSTALLED = "not installed"


def main() -> None:
    """Measure what the command line asks for."""
    options = parse_arguments()
    started = time.monotonic()
    torch.set_num_threads(1)  # OpenMP's workers would not survive the fork
    if options.device == "sim" and not simnpu.install(num_devices=options.ranks):
        raise SystemExit("--device sim: torch has a real npu here; use --device npu")
    rows, limits = measure(options)
    described = conditions(options, limits)
    report = {"rows": [row.to_json() for row in rows], "conditions": described}
    print_table(rows, described)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        from clip_chart import draw_clips

        draw_clips([(options.layout, rows)], options.plot)
    log(f"{options.layout}: done in {time.monotonic() - started:.0f} s")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUT_NAMES, default="multi_component")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", choices=sorted(_BACKENDS), default="sim")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        help=f"of {', '.join(METHODS)}; with {_PLUS_GLOO} behind it only on a group with gloo",
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed clips of each method")
    parser.add_argument("--scale", type=float, default=1.0, help="what shard sizes are times")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--plot", help="draw them to this file (needs matplotlib)")
    parser.add_argument("--trace", help="write rank 0's profile to this file, for chrome://tracing")
    options = parser.parse_args()
    unknown = [name for name in options.methods if name.removesuffix(_PLUS_GLOO) not in METHODS]
    if unknown:
        parser.error(f"--methods: {', '.join(unknown)}: no such method")
    if options.repeats < 1 or options.ranks < 1 or not options.scale > 0:
        parser.error("--repeats, --ranks and --scale must be positive")
    return options


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """Return a row per method, a second one for peers that needed gloo, and memory's limits."""
    plain = [name for name in options.methods if not name.endswith(_PLUS_GLOO)]
    with_gloo = [name.removesuffix(_PLUS_GLOO) for name in options.methods if name not in plain]
    rows: list[Row] = []
    limits: dict[str, float] = {}
    if plain:
        rows, limits = measure_on(options, _BACKENDS[options.device], plain, "")
    if options.device in _GLOO_TOO:
        with_gloo += [row.method for row in rows if needs_gloo(row) and row.method not in with_gloo]
        if with_gloo:
            more, limits_then = measure_on(
                options, _GLOO_TOO[options.device], with_gloo, _PLUS_GLOO
            )
            # What fails on both kinds of group with the same words is said once.
            said = {(row.method, row.error) for row in rows if row.error is not None}
            rows += [r for r in more if (r.method.removesuffix(_PLUS_GLOO), r.error) not in said]
            limits = limits or limits_then
    return rows, limits


def needs_gloo(row: Row) -> bool:
    """Whether someone else's method failed, and may work where CPU tensors can be reduced."""
    return METHODS[row.method].is_peer and row.error not in (None, _NOT_INSTALLED)


def measure_on(
    options: argparse.Namespace, backend: str, methods: list[str], suffix: str
) -> tuple[list[Row], dict[str, float]]:
    """Measure methods on one kind of group; one that hangs or ends ranks is left out next time."""
    errors = {name: _NOT_INSTALLED for name in methods if not METHODS[name].is_installed()}
    preload(options, [name for name in methods if name not in errors])
    of_ranks: list[SessionResult] = []
    while not of_ranks:
        plan = Plan(
            options.layout,
            options.scale,
            [name for name in methods if name not in errors],
            options.device,
            options.repeats,
            _MAX_NORM,
            injected_latencies() if options.device == "sim" else {},
            options.trace if methods[0] + suffix in options.methods else None,
        )
        log(f"{options.layout}: {len(plan.methods)} methods on {options.ranks} ranks ({backend})")
        try:
            of_ranks = run_ranks(run_session, options.ranks, plan, backend=backend)
        except RankFailedError as failure:
            if failure.doing not in plan.methods:
                raise
            errors[failure.doing] = str(failure).strip().splitlines()[-1]
            log(f"{options.layout}: {failure.doing}: {errors[failure.doing]}; again without it")
    rows = []
    for name in methods:
        outcomes = [own.outcomes.get(name) or Outcome(errors[name]) for own in of_ranks]
        identity: dict[str, Any] = {
            "method": name + suffix,
            "layout": options.layout,
            "ranks": options.ranks,
            "group": backend,
            "version": METHODS[name].version(),
        }
        rows.append(build_row(identity, outcomes, _MAX_NORM))
    slowest = {name: max(own.limits_s[name] for own in of_ranks) for name in of_ranks[0].limits_s}
    return rows, {f"{name}_ms": seconds * 1e3 for name, seconds in slowest.items()}


def preload(options: argparse.Namespace, methods: list[str]) -> None:
    """Import what peers import, once for all ranks."""
    for name in methods:
        for module in METHODS[name].modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                log(f"{options.layout}: {name}: {type(error).__name__}: {error}")


def conditions(options: argparse.Namespace, limits: dict[str, float]) -> dict[str, Any]:
    """Return what the figures depend on."""
    layout = load_layout(options.layout, options.scale)
    described: dict[str, Any] = {
        **describe_machine(),
        "layout": options.layout,
        "layout_title": layout.title,
        "scale": options.scale,
        "elements_per_rank": layout.numel_per_rank,
        "tensors_per_rank": len(layout.parameters),
        "hops": layout.num_hops(options.ranks),
        "dtype": "float32",
        "ranks": options.ranks,
        "repeats": options.repeats,
        "max_norm": _MAX_NORM,
        "wrong_above": WRONG_ABOVE,
        "device": options.device,
        "memory_limits": limits,
        "versions": {name: METHODS[name].version() for name in METHODS if METHODS[name].package},
    }
    if options.device == "sim":
        described["injected"] = injected_latencies()
    return described


def log(text: str) -> None:
    """Say how far we are, apart from the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
