"""What all ranks measured of one method, as one row of the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clip_session import Outcome
from true_norm import WRONG_ABOVE, relative_error

__all__ = ["Row", "Spread", "build_row", "row_from_json"]

_COUNTS = ("h2d", "d2h", "collectives", "host_syncs", "h2d_bytes", "d2h_bytes")


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile, in milliseconds."""

    p50: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return that of samples in seconds."""
        ordered = sorted(seconds)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return cls(round(statistics.median(ordered) * 1e3, 4), round(p95 * 1e3, 4))


@dataclass(frozen=True)
class Row:
    """One method on one layout.

    Attributes:
        method: Its name; with `+gloo` behind it on groups that reduce CPU tensors, too.
        error: What it says of a layout that it does not support; all below is None then.
        h2d, d2h, collectives, host_syncs, h2d_bytes, d2h_bytes: Of one clip on one rank. None:
            nobody counts here.
        payload_bytes: What a rank gives to collectives.
        host_norm_ms, python_ms, scale_ms: CPU time of the slowest rank.
        wait_ms: The rest of its time of day: for copies, collectives, other ranks and a core.
        total_ms: Time of day from when the last rank has left a barrier to when the last is done.
        skew_ms: By how much the first rank leaves that barrier earlier; not part of the total.
        scalar_path_ms: From partial norms on all ranks to the total norm on all, by itself; None
            for those that cannot be stopped in between.
        wrong: Whether the norm, or that of what the clip left, is off by more than WRONG_ABOVE.
    """

    method: str
    layout: str
    ranks: int
    group: str
    version: str | None
    supported: bool
    error: str | None = None
    h2d: int | None = None
    d2h: int | None = None
    collectives: int | None = None
    host_syncs: int | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    payload_bytes: int | None = None
    host_norm_ms: Spread | None = None
    python_ms: Spread | None = None
    wait_ms: Spread | None = None
    scale_ms: Spread | None = None
    total_ms: Spread | None = None
    skew_ms: Spread | None = None
    scalar_path_ms: Spread | None = None
    norm: float | None = None
    rel_error: float | None = None
    post_clip_norm: float | None = None
    wrong: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)


def row_from_json(values: dict[str, Any]) -> Row:
    """Return the row that `to_json` was called on."""
    spreads = {name: Spread(**value) for name, value in values.items() if isinstance(value, dict)}
    return Row(**{**values, **spreads})


def build_row(identity: dict[str, Any], of_ranks: Sequence[Outcome], max_norm: float) -> Row:
    """Combine the ranks' outcomes of one method.

    Args:
        identity: The first fields of the row, up to `version`.
        of_ranks: By rank.
        max_norm: What was clipped to.

    Raises:
        AssertionError: If ranks or repeats differ in their counts.
    """
    first = of_ranks[0]
    if first.error is not None:
        return Row(**identity, supported=False, error=first.error)
    worst = max(of_ranks, key=lambda outcome: relative_error(outcome.norm, first.true_norm))
    error = relative_error(worst.norm, first.true_norm)
    # What torch's formula leaves of the exact norm, whose coefficient is rounded to float32.
    clipped = first.true_norm * min(1.0, max_norm / (first.true_norm + 1e-6))
    post_error = relative_error(first.post_clip_norm, clipped)
    return Row(
        **identity,
        supported=True,
        **_counts(identity["method"], of_ranks),
        **_times(of_ranks),
        norm=worst.norm,
        rel_error=error,
        post_clip_norm=first.post_clip_norm,
        wrong=max(error, post_error) > WRONG_ABOVE,
    )


def _counts(method: str, of_ranks: Sequence[Outcome]) -> dict[str, Any]:
    """Return what the simulator counted; elsewhere what was seen of the operators.

    Collectives of gloo on CPU tensors are no business of the simulator, so that the operators tell
    of those.
    """
    seen = [seen for outcome in of_ranks for seen in outcome.seen]
    counted = [sample.counts for outcome in of_ranks for sample in outcome.samples]
    counts: dict[str, int | None] = {"host_syncs": None, **seen[0].copies}
    if counted[0] is not None:
        if any(one != counted[0] for one in counted):
            raise AssertionError(f"{method}: ranks or repeats differ in their counts: {counted}")
        counts = {name: counted[0][name] for name in _COUNTS}
    counts["collectives"] = seen[0].collectives
    counts["payload_bytes"] = seen[0].payload_bytes
    return counts


def _times(of_ranks: Sequence[Outcome]) -> dict[str, Any]:
    norm_s = _slowest(of_ranks, lambda outcome: [seen.norm_s for seen in outcome.seen])
    scale_s = _slowest(of_ranks, lambda outcome: [seen.scale_s for seen in outcome.seen])
    passes_s = statistics.median(norm_s) + statistics.median(scale_s)
    cpu_s = _slowest(of_ranks, lambda outcome: [sample.cpu_s for sample in outcome.samples])
    wait_s = _slowest(
        of_ranks, lambda outcome: [max(0.0, s.end_s - s.start_s - s.cpu_s) for s in outcome.samples]
    )
    last_start = _slowest(of_ranks, lambda outcome: [s.start_s for s in outcome.samples])
    first_start = _slowest(of_ranks, lambda outcome: [-s.start_s for s in outcome.samples])
    last_end = _slowest(of_ranks, lambda outcome: [s.end_s for s in outcome.samples])
    path_start = _slowest(of_ranks, lambda outcome: [start for start, _ in outcome.scalar_paths])
    path_end = _slowest(of_ranks, lambda outcome: [end for _, end in outcome.scalar_paths])
    return {
        "host_norm_ms": Spread.of(norm_s),
        "python_ms": Spread.of([max(0.0, seconds - passes_s) for seconds in cpu_s]),
        "wait_ms": Spread.of(wait_s),
        "scale_ms": Spread.of(scale_s),
        "total_ms": Spread.of(_differences(last_end, last_start)),
        "skew_ms": Spread.of([a + b for a, b in zip(last_start, first_start, strict=True)]),
        "scalar_path_ms": Spread.of(_differences(path_end, path_start)) if path_end else None,
    }


def _differences(ends: Sequence[float], starts: Sequence[float]) -> list[float]:
    return [end - start for end, start in zip(ends, starts, strict=True)]


def _slowest(
    of_ranks: Sequence[Outcome], values: Callable[[Outcome], Sequence[float]]
) -> list[float]:
    """Return the largest value over ranks, by turn."""
    return [max(by_rank) for by_rank in zip(*map(values, of_ranks), strict=True)]
