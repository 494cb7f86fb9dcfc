"""`make bench`: every layout, the model, the charts and the README's tables.

python benchmarks/run_all.py               # the committed results, in 10 minutes on 2 cores
python benchmarks/run_all.py --quick       # small shards and few repeats, to try things out
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from clip_chart import draw_clips
from clip_rows import row_from_json
from readme_tables import RUNS, update_readme

_HERE = Path(__file__).parent
_RESULTS = _HERE / "results"
# Ranks, scale of the shards, repeats. Eight ranks share two cores; kimi_k2 runs on one rank per
# core, with shards that are large enough for the model to be extrapolated from.
_SETTINGS = {
    "fsdp8": (8, 0.25, 15),
    "hsdp2x4": (8, 0.25, 15),
    "tp2_ep2": (8, 0.5, 15),
    "multi_component": (8, 1.0, 15),
    "kimi_k2": (2, 0.005, 9),
}


def main() -> None:
    """Run everything that the README shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and few")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder to write to")
    parser.add_argument("--readme", type=Path, default=_HERE.parent / "README.md")
    options = parser.parse_args()
    options.results.mkdir(exist_ok=True)
    started = time.monotonic()
    for number, layout in enumerate(RUNS):
        ranks, scale, repeats = _SETTINGS[layout]
        if options.quick:
            scale, repeats = scale / 20, 3
        say(f"bench: {layout}, {number + 1}/{len(RUNS)}, {time.monotonic() - started:.0f} s so far")
        run(
            "clip_latency.py",
            *("--layout", layout, "--ranks", str(ranks), "--scale", str(scale)),
            *("--repeats", str(repeats), "--json", str(options.results / f"{layout}.json")),
        )
    run(
        "latency_model.py",
        *("--measured", str(options.results / "kimi_k2.json")),
        *("--json", str(options.results / "latency_model.json")),
        *("--plot", str(options.results / "latency_model.png")),
    )
    measured = []
    for layout in RUNS:
        report = json.loads((options.results / f"{layout}.json").read_text())
        measured.append((layout, [row_from_json(row) for row in report["rows"]]))
    draw_clips(measured, str(options.results / "clip_latency.png"))
    update_readme(options.readme, options.results)
    say(f"bench: done in {time.monotonic() - started:.0f} s")


def run(script: str, *arguments: str) -> None:
    """Run one of the scripts beside this one."""
    subprocess.run([sys.executable, str(_HERE / script), *arguments], check=True)


def say(text: str) -> None:
    """Tell the progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
