"""Draws measured clips: where the time of each method goes, on each layout."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from clip_rows import Row

mpl.use("Agg")
from matplotlib import pyplot

__all__ = ["draw_clips"]

_TERMS = {
    "host_norm_ms": ("host norm", "#c44e52"),
    "scale_ms": ("scale", "#dd8452"),
    "python_ms": ("Python", "#4c72b0"),
    "wait_ms": ("wait for copies, collectives, ranks and cores", "#c8c8c8"),
}


def draw_clips(layouts: Sequence[tuple[str, Sequence[Row]]], path: str) -> None:
    """Draw a panel per layout, a bar per method; wrong norms and methods that failed are named."""
    heights = [0.6 + 0.24 * len(rows) for _, rows in layouts]
    figure, panels = pyplot.subplots(
        len(layouts),
        1,
        figsize=(10, sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for panel, (layout, rows) in zip(panels[:, 0], layouts, strict=True):
        for place, row in enumerate(rows):
            left = 0.0
            for term, (label, color) in _TERMS.items():
                spread = getattr(row, term)
                width = 0.0 if spread is None else spread.p50
                panel.barh(place, width, left=left, color=color, label=label if not place else None)
                left += width
            note = " wrong norm" if row.wrong else ""
            if not row.supported:
                note = f"{row.error}"[:90]
            panel.text(left, place, note, va="center", fontsize=7, color="#802020")
        panel.set_yticks(range(len(rows)), [row.method for row in rows], fontsize=8)
        panel.invert_yaxis()
        panel.set_title(layout, fontsize=9, loc="left")
    bars, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(bars, labels, fontsize=8, loc="outside upper center", ncols=len(labels))
    panels[-1, 0].set_xlabel("ms, medians; the slowest rank's CPU time by kind, and its wait")
    figure.savefig(path, dpi=65)
    pyplot.close(figure)
