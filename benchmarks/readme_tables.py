"""Writes the README's benchmark section from benchmarks/results: no figure in it is typed.

python benchmarks/readme_tables.py          # after results changed; `make bench` does it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clip_rows import Row, row_from_json
from clip_table import describe_conditions, markdown_table

__all__ = ["RUNS", "render", "update_readme"]

RUNS = ("fsdp8", "hsdp2x4", "tp2_ep2", "multi_component", "kimi_k2")
_SHOWN = ("kimi_k2", "multi_component")
_BEGIN = "<!-- benchmarks: written by benchmarks/readme_tables.py -->"
_END = "<!-- end of benchmarks -->"
_OURS, _HOP = "hyper_parallel", "scalar_hop"


def update_readme(readme: Path, results: Path) -> None:
    """Replace what is between the markers."""
    text = readme.read_text()
    before, rest = text.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    readme.write_text(f"{before}{_BEGIN}\n{render(results)}\n{_END}{after}")


def render(results: Path) -> str:
    """Return the section: the truth in a few sentences, the chart and the tables."""
    reports = {name: json.loads((results / f"{name}.json").read_text()) for name in RUNS}
    model = json.loads((results / "latency_model.json").read_text())
    parts = [_truth(reports, model), "![What clipping costs](benchmarks/results/latency_model.png)"]
    for name in _SHOWN:
        rows = [row_from_json(row) for row in reports[name]["rows"]]
        parts += [describe_conditions(reports[name]["conditions"]), markdown_table(rows)]
    parts.append(_all_layouts(reports))
    return "\n\n".join(parts)


def _truth(reports: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Say which term dominates, what packing saves and what removing host passes saves."""
    cells = {
        (row["machine"], row["ranks"], row["method"], row["level"]): row for row in model["rows"]
    }

    def terms(method: str) -> dict[str, float]:
        values: dict[str, float] = cells["a2", 128, method, "typical"]["terms_ms"]
        return values

    hop, ours = terms(_HOP), terms(_OURS)
    none = cells["a2", 128, "hyper_parallel, no host pass", "typical"]["total_ms"]
    passes = hop["host norm"] + hop["scale"]
    hops_ms, packed_ms = (t["copies"] + t["collectives"] for t in (hop, ours))
    multi = _by_method(reports["multi_component"])
    num_hops = reports["multi_component"]["conditions"]["hops"]
    whole = _total(multi[_HOP]) / _total(multi[_OURS])
    injected = reports["multi_component"]["conditions"]["injected"]
    hop_ms = (2 * injected["copy_us"] + injected["collective_us"]) * 1e-3
    kimi = _by_method(reports["kimi_k2"])
    return (
        "**Host passes dominate.** Modelled for 8.0e9 float32 elements per rank, 128 ranks of "
        f"Atlas A2 and typical constants, they take {passes:,.0f} of {sum(hop.values()):,.0f} ms "
        f"when torch's operators make them on one thread, and "
        f"{ours['host norm'] + ours['scale']:,.0f} of {sum(ours.values()):,.0f} ms with ours; "
        f"packing turns {hops_ms:.1f} ms of hops into {packed_ms:.2f} ms, which is "
        f"{100 * (hops_ms - packed_ms) / sum(hop.values()):.2f} % of the step's clip; "
        f"doing without host passes (norm before offload, scaling in the optimizer) leaves "
        f"{none:,.1f} ms.\n\n"
        f"Measured here on {num_hops} hops (multi_component, simulated NPU, injected latencies): "
        f"the way from partial norms to the total norm is {_path_ratio(multi):.1f} times as fast "
        f"as one hop per bucket and mesh dim, the whole clip {whole:.2f} times. Of that way "
        f"{num_hops * hop_ms:.2f} ms are injected for the hops and {hop_ms:.2f} ms for ours, the "
        "rest is what ranks that share the cores take for gloo and Python. On Kimi-K2's "
        f"shards (kimi_k2) the whole clip is {_total(kimi[_HOP]) / _total(kimi[_OURS]):.2f} times "
        "as fast."
    )


def _all_layouts(reports: Mapping[str, Any]) -> str:
    """Return the medians of whole clips on all layouts, by method."""
    by_layout = {name: _by_method(report) for name, report in reports.items()}
    methods = list(dict.fromkeys(method for rows in by_layout.values() for method in rows))
    lines = ["| total p50, ms | " + " | ".join(RUNS) + " |", "|---" * (len(RUNS) + 1) + "|"]
    for method in methods:
        cells = [_cell(by_layout[name].get(method)) for name in RUNS]
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    note = "Empty: not supported, or not needed beside the row without gloo."
    return "\n".join(lines) + f"\n\n{note} All figures: benchmarks/results."


def _cell(row: Row | None) -> str:
    if row is None or row.total_ms is None:
        return ""
    return f"{row.total_ms.p50:.1f}" + (", wrong norm" if row.wrong else "")


def _by_method(report: Mapping[str, Any]) -> dict[str, Row]:
    rows = [row_from_json(row) for row in report["rows"]]
    return {row.method: row for row in rows}


def _total(row: Row) -> float:
    return row.total_ms.p50 if row.total_ms is not None else float("nan")


def _path_ratio(rows: Mapping[str, Row]) -> float:
    theirs, ours = rows[_HOP].scalar_path_ms, rows[_OURS].scalar_path_ms
    return theirs.p50 / ours.p50 if theirs is not None and ours is not None else float("nan")


def main() -> None:
    """Update the README of this repository, or another file with the same markers."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", type=Path, default=here.parent / "README.md")
    parser.add_argument("--results", type=Path, default=here / "results")
    options = parser.parse_args()
    update_readme(options.readme, options.results)


if __name__ == "__main__":
    main()
