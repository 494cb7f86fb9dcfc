"""Draws the modelled cost of clipping over ranks, stacked by term, with its band."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from latency_constants import LEVELS, load_machines

mpl.use("Agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from latency_model import Model, Prediction

__all__ = ["draw_predictions"]

_SHOWN_RANKS = (8, 128, 1024, 8192)
_COLORS = {
    "host norm": "#c44e52",
    "scale": "#dd8452",
    "Python": "#4c72b0",
    "copies": "#55a868",
    "collectives": "#8172b3",
    "skew": "#c8c8c8",
}
_HOST_PASSES = ("host norm", "scale")


def draw_predictions(predictions: Sequence[Prediction], model: Model, path: str) -> None:
    """Draw a column per machine: all terms above, below those that are left without host passes."""
    machines = load_machines()
    figure, panels = pyplot.subplots(
        2, len(machines), figsize=(15, 9), sharey="row", layout="constrained"
    )
    for column, machine in enumerate(machines.values()):
        own = [p for p in predictions if p.machine == machine.key and p.ranks in _SHOWN_RANKS]
        _draw_panel(panels[0, column], own, tuple(_COLORS))
        _draw_points(panels[1, column], own)
        panels[0, column].set_title(machine.title, fontsize=10)
    panels[0, 0].set_ylabel("ms per clip, all terms")
    panels[1, 0].set_ylabel("ms per clip, host passes left out (log)")
    bars, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(bars, labels, fontsize=9, loc="outside lower center", ncols=len(labels))
    figure.suptitle(
        f"Modelled: clipping {model.elements / 1e9:.1f}e9 float32 elements per rank on the host, "
        f"{model.buckets} buckets x {model.dims} mesh dims. Bars: typical; lines: low to high",
        fontsize=12,
    )
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_panel(panel: Any, predictions: Sequence[Prediction], terms: Sequence[str]) -> None:
    cells = list(_cells(predictions, terms))
    for place, _, _, typical, _ in cells:
        bottom = 0.0
        for term in terms:
            named = term if place == cells[0][0] else None
            height = typical[term]
            panel.bar(place, height, 0.18, bottom=bottom, color=_COLORS[term], label=named)
            bottom += height
    _finish(panel, cells)


def _draw_points(panel: Any, predictions: Sequence[Prediction]) -> None:
    terms = tuple(term for term in _COLORS if term not in _HOST_PASSES)
    cells = list(_cells(predictions, terms))
    for place, _, _, typical, _ in cells:
        panel.plot([place], [sum(typical.values())], "o", color="black", markersize=4)
    panel.set_yscale("log")
    _finish(panel, cells)


_Terms = dict[str, float]
_Cell = tuple[float, str, _Terms, _Terms, _Terms]


def _cells(predictions: Sequence[Prediction], terms: Sequence[str]) -> Iterator[_Cell]:
    """Yield place, method and the terms at all three levels, by ranks and method."""
    methods = list(dict.fromkeys(p.method for p in predictions))
    by_cell = {(p.ranks, p.method, p.level): p.terms_ms for p in predictions}
    for group, ranks in enumerate(_SHOWN_RANKS):
        for i, method in enumerate(methods):
            low, typical, high = (
                {term: by_cell[ranks, method, level][term] for term in terms} for level in LEVELS
            )
            yield (
                group + 0.2 * (i - (len(methods) - 1) / 2),
                method,
                low,
                typical,
                high,
            )


def _finish(panel: Any, cells: Sequence[_Cell]) -> None:
    """Draw the bands and name the cells."""
    for place, _, low, typical, high in cells:
        total = sum(typical.values())
        ends = [[total - sum(low.values())], [sum(high.values()) - total]]
        panel.errorbar([place], [total], yerr=ends, color="black", linewidth=0.8, capsize=2)
    panel.set_xticks([c[0] for c in cells], [c[1] for c in cells], rotation=90, fontsize=8)
    groups = panel.secondary_xaxis("top")
    groups.set_xticks(range(len(_SHOWN_RANKS)), [f"{n} ranks" for n in _SHOWN_RANKS], fontsize=8)
    groups.tick_params(length=0)
    panel.set_xlim(-0.5, len(_SHOWN_RANKS) - 0.5)
