"""What clipping costs a step on up to 8192 ranks: T = host norm + Python + copies + collectives
+ scale + skew.

Host norm, Python and scale are taken from runs here (`clip_latency.py --layout kimi_k2 --json`),
per element and per shard, for the 8.0e9 elements that a rank of Kimi-K2 holds. Ours are fractions
of what this machine's memory allows, and take a rank's bandwidth from the constants; torch's norm
runs on one thread wherever it is, and takes what it takes here. Copies, collectives and skew are
injected from `latency_constants.toml`. Which is which stands in the output, and each figure has a
low, a typical and a high value, since most constants are guesses.

    all-reduce = dispatch + time in a server + 2 log2(servers) steps + 2 bytes / bandwidth

    python benchmarks/latency_model.py --measured results/kimi_k2.json --json F --plot F.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clip_layouts import load_layout
from clip_rows import Row, row_from_json
from latency_constants import LEVELS, Machine, load_machines
from machine import describe_machine

from hyper_parallel.platform.torch.wire_format import WireFormat

__all__ = ["METHODS", "NUM_RANKS", "Prediction", "predict_all"]

NUM_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
METHODS = ("scalar_hop", "torch+gloo", "hyper_parallel", "hyper_parallel, no host pass")
_CLIPS_PER_MESH = ("torch+gloo", "torchtitan+gloo", "accelerate+gloo", "transformers+gloo")
_NO_HOST_PASS = "hyper_parallel+early norm+optimizer"
_BYTES = 4  # float32 gradients
_SCALAR_BYTES = 4


@dataclass(frozen=True)
class Measured:
    """Figures from runs here.

    Attributes:
        norm_s, scale_s: Of torch on one thread, for all elements of the model.
        norm_of_limit, scale_of_limit: Of ours, as a fraction of this machine's memory speed.
        python_s: By method.
    """

    norm_s: float
    scale_s: float
    norm_of_limit: float
    scale_of_limit: float
    python_s: Mapping[str, float]


@dataclass(frozen=True)
class Model:
    """The clip that is modelled: K buckets of like-placed parameters, D mesh dims that shard each.

    The first of two dims is within a server, the other across servers.
    """

    elements: int
    buckets: int
    dims: int


@dataclass(frozen=True)
class Prediction:
    """Milliseconds by term, for one method, machine, number of ranks and level."""

    machine: str
    ranks: int
    method: str
    level: str
    terms_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        """All terms."""
        return sum(self.terms_ms.values())


SOURCES = {
    "host norm": "measured here; ours a measured fraction of the constants' host bandwidth",
    "scale": "measured here; ours a measured fraction of the constants' host bandwidth",
    "Python": "measured here",
    "copies": "injected from the constants",
    "collectives": "injected from the constants",
    "skew": "injected from the constants",
}


def allreduce_us(machine: Machine, ranks: int, num_bytes: float, level: str) -> float:
    """Return the time of one all-reduce on the device, dispatch included."""
    servers = max(1, math.ceil(ranks / machine.ranks_per_server))
    levels_up = math.log2(servers)
    taken = machine.at("dispatch", level) + machine.at("allreduce_server", level)
    if machine.ranks_per_supernode and ranks > machine.ranks_per_supernode:
        beyond = math.log2(ranks / machine.ranks_per_supernode)
        levels_up -= beyond
        taken += 2 * beyond * machine.at("step_between_supernodes", level)
    taken += 2 * levels_up * machine.at("step_between_servers", level)
    return taken + 2 * num_bytes / machine.at("link_bandwidth", level) * 1e-3


def packed_bytes(ranks: int, lanes: int) -> int:
    """Return the size of our buffer: the header and a lane per rank set."""
    wire = WireFormat(ranks, 2.0)
    return (wire.header_numel + lanes * wire.lane_numel) * 4


def predict(
    method: str, machine: Machine, ranks: int, level: str, model: Model, measured: Measured
) -> Prediction:
    """Return one cell of the model."""
    terms = dict.fromkeys(SOURCES, 0.0)
    terms["skew"] = machine.at("skew", level) * 1e-3
    terms["Python"] = measured.python_s[method] * 1e3
    if method in ("scalar_hop", "torch+gloo"):
        terms["host norm"] = measured.norm_s * 1e3
        terms["scale"] = measured.scale_s * 1e3
    elif method == "hyper_parallel":
        milliseconds_per_pass = model.elements * _BYTES / machine.at(_HOST, level) * 1e-6
        terms["host norm"] = milliseconds_per_pass / measured.norm_of_limit
        terms["scale"] = 2 * milliseconds_per_pass / measured.scale_of_limit
    hops = model.buckets * model.dims
    if method == "scalar_hop":
        copies = machine.at("h2d_pageable", level) + machine.at("d2h_and_sync", level)
        across = allreduce_us(machine, ranks, _SCALAR_BYTES, level)
        inside = allreduce_us(machine, min(ranks, machine.ranks_per_server), _SCALAR_BYTES, level)
        terms["copies"] = hops * copies * 1e-3
        terms["collectives"] = model.buckets * (across + (model.dims - 1) * inside) * 1e-3
    elif method == "torch+gloo":
        terms["collectives"] = hops * machine.at("gloo_allreduce", level) * 1e-3
    else:
        copies = machine.at("h2d_pinned", level) + machine.at("d2h_and_sync", level)
        terms["copies"] = copies * 1e-3
        num_bytes = packed_bytes(ranks, model.buckets)
        terms["collectives"] = allreduce_us(machine, ranks, num_bytes, level) * 1e-3
    return Prediction(machine.key, ranks, method, level, terms)


_HOST = "host_bandwidth_per_rank"


def predict_all(model: Model, measured: Measured) -> list[Prediction]:
    """Return every cell."""
    return [
        predict(method, machine, ranks, level, model, measured)
        for machine in load_machines().values()
        for ranks in NUM_RANKS
        for method in METHODS
        for level in LEVELS
    ]


def read_measured(report: Mapping[str, Any], elements: int) -> Measured:
    """Take the measured terms from a run of `clip_latency.py` on the same layout."""
    rows = {row["method"]: row_from_json(row) for row in report["rows"] if row["supported"]}
    factor = elements / report["conditions"]["elements_per_rank"]
    limits = report["conditions"]["memory_limits"]
    ours, theirs = rows["hyper_parallel"], rows["scalar_hop"]
    return Measured(
        norm_s=_median_s(theirs, "host_norm_ms") * factor,
        scale_s=_median_s(theirs, "scale_ms") * factor,
        norm_of_limit=min(1.0, limits["read_ms"] * 1e-3 / _median_s(ours, "host_norm_ms")),
        scale_of_limit=min(1.0, limits["read_and_write_ms"] * 1e-3 / _median_s(ours, "scale_ms")),
        python_s=_python_s(rows),
    )


def _python_s(rows: Mapping[str, Row]) -> dict[str, float]:
    """Return the Python of each modelled method.

    torch's own clip refuses gradients on two meshes, so that the fastest stands in of the
    libraries that call it per mesh.
    """
    own = {name: _median_s(row, "python_ms") for name, row in rows.items()}
    per_mesh = [own[name] for name in _CLIPS_PER_MESH if name in own]
    return {
        "scalar_hop": own["scalar_hop"],
        "torch+gloo": min(per_mesh, default=own["scalar_hop"]),
        "hyper_parallel": own["hyper_parallel"],
        "hyper_parallel, no host pass": own.get(_NO_HOST_PASS, own["hyper_parallel"]),
    }


def _median_s(row: Row, term: str) -> float:
    return float(getattr(row, term).p50) * 1e-3


def print_predictions(predictions: Sequence[Prediction]) -> None:
    """Print the typical terms and the band of the total."""
    print("terms: " + "; ".join(f"{term}: {source}" for term, source in SOURCES.items()))
    print(f"{'machine':8s} {'ranks':>5s} {'method':30s} " + " ".join(f"{t:>11s}" for t in SOURCES))
    totals = {(p.machine, p.ranks, p.method, p.level): p.total_ms for p in predictions}
    for p in predictions:
        if p.level == "typical" and p.ranks in (8, 128, 1024, 8192):
            low, high = (totals[p.machine, p.ranks, p.method, level] for level in ("low", "high"))
            terms = " ".join(f"{p.terms_ms[term]:11.3f}" for term in SOURCES)
            band = f"{p.total_ms:9.1f} ms ({low:.1f} to {high:.1f})"
            print(f"{p.machine:8s} {p.ranks:5d} {p.method:30s} {terms} {band}")


def main() -> None:
    """Model what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", required=True, help="JSON of a run on the kimi_k2 layout")
    parser.add_argument("--buckets", type=int, default=8, help="K: of like-placed parameters")
    parser.add_argument("--dims", type=int, default=2, choices=(1, 2), help="D: mesh dims of each")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--plot", help="draw them to this file (needs matplotlib)")
    options = parser.parse_args()
    report = json.loads(Path(options.measured).read_text())
    elements = load_layout("kimi_k2").numel_per_rank
    model = Model(elements, options.buckets, options.dims)
    measured = read_measured(report, elements)
    predictions = predict_all(model, measured)
    print_predictions(predictions)
    if options.json:
        values = {
            "rows": [{**asdict(p), "total_ms": p.total_ms} for p in predictions],
            "conditions": {
                **describe_machine(),
                "model": asdict(model),
                "measured": asdict(measured),
                "measured_by": report["conditions"]["commit"],
                "sources": SOURCES,
                "constants": {key: asdict(machine) for key, machine in load_machines().items()},
            },
        }
        Path(options.json).write_text(json.dumps(values, indent=1) + "\n")
    if options.plot:
        from latency_chart import draw_predictions

        draw_predictions(predictions, model, options.plot)


if __name__ == "__main__":
    main()
