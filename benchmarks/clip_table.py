"""Rows as tables: for a terminal, and for the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clip_rows import Row, Spread

__all__ = ["describe_conditions", "markdown_table", "print_table"]

_HEADS = (
    "method",
    "H2D",
    "D2H",
    "coll.",
    "syncs",
    "bytes",
    "payload",
    "host norm",
    "Python",
    "wait",
    "scale",
    "total p50",
    "p95",
    "skew",
    "scalar path",
    "norm",
    "rel. error",
    "post-clip",
)


def print_table(rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
    """Print the conditions and a line per row; times are milliseconds."""
    print(describe_conditions(conditions))
    cells = [_HEADS, *(_cells(row) for row in rows if row.supported)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADS))]
    for line in cells:
        first = line[0].ljust(widths[0])
        print("  ".join([first, *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]))
    for row in rows:
        if not row.supported:
            print(f"{row.method.ljust(widths[0])}  {row.error}")


def describe_conditions(conditions: Mapping[str, Any]) -> str:
    """Return the head of a table: what was measured, where, and what was injected."""
    text = (
        f"{conditions['layout']}: {conditions['layout_title']}; {conditions['ranks']} ranks, "
        f"{conditions['elements_per_rank']:,} {conditions['dtype']} elements in "
        f"{conditions['tensors_per_rank']} shards each; {conditions['cpu']}, "
        f"{conditions['cpus']} CPUs, torch {conditions['torch']}, commit {conditions['commit']}. "
    )
    if "injected" in conditions:
        injected = conditions["injected"]
        text += (
            f"Simulated NPU: each copy takes {injected['copy_us']:g} us and each collective "
            f"{injected['collective_us']:g} us, injected, on top of what gloo takes here; "
            "gloo's own collectives on CPU tensors take what they take on this machine. "
        )
    return text + "All ranks share the CPUs, and wait for one in 'wait'. Times are milliseconds."


def markdown_table(rows: Sequence[Row]) -> str:
    """Return a table of the columns that decide, and a row for each that does not support it."""
    lines = [
        "| method | copies up / collectives / copies down / host syncs | host norm | Python | wait "
        "| scale | total p50 | p95 | norm's relative error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row.supported:
            lines.append(f"| {row.method} | {_escape(row.error or '')} | | | | | | | |")
            continue
        counts = " / ".join(
            _count(value) for value in (row.h2d, row.collectives, row.d2h, row.host_syncs)
        )
        spreads = (row.host_norm_ms, row.python_ms, row.wait_ms, row.scale_ms, row.total_ms)
        medians = " | ".join(f"{spread.p50:.1f}" for spread in spreads if spread is not None)
        p95 = _p95(row.total_ms)
        lines.append(f"| {row.method} | {counts} | {medians} | {p95} | {_error(row)} |")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    copied = None if row.h2d_bytes is None else row.h2d_bytes + (row.d2h_bytes or 0)
    return (
        row.method,
        *map(_count, (row.h2d, row.d2h, row.collectives, row.host_syncs)),
        *map(_count, (copied, row.payload_bytes)),
        *map(_p50, (row.host_norm_ms, row.python_ms, row.wait_ms, row.scale_ms, row.total_ms)),
        _p95(row.total_ms),
        _p50(row.skew_ms),
        _p50(row.scalar_path_ms),
        f"{row.norm:.6g}",
        _error(row),
        f"{row.post_clip_norm:.6f}",
    )


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _p50(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.2f}"


def _p95(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p95:.1f}"


def _error(row: Row) -> str:
    return f"{row.rel_error:.0e}" + (" WRONG" if row.wrong else "")


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
