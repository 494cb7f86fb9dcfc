"""What `partial_norms` says of each segment, as the host reads it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_ROWS_PER_LANE", "ROW_NUMEL", "RowTotal", "total_of_rows"]

ROW_NUMEL = 24
"""Floats per row: 8 for the sums of the groups, of which 3 are used, 8 for what these leave, 8 for
largest magnitude, NaN count, infinity count."""

MAX_ROWS_PER_LANE = 32768
"""What `encode` can add up without its digits leaving int32."""

# Log2 of what the elements of each group were scaled by.
_GROUP_EXPONENTS = (75, 0, -90)
_LOWS = 8
_EXTREMES = 16


class RowTotal(NamedTuple):
    """Rows taken together.

    Attributes:
        pow_sum: Sum of |x|^power over elements in blocks without NaN or infinity, in float64;
            infinite where that overflows, 0 if power is 0.
        max_abs: Largest magnitude in such blocks.
        num_nan: NaN elements.
        num_inf: Infinite elements.
    """

    pow_sum: float
    max_abs: float
    num_nan: int
    num_inf: int


def total_of_rows(rows: Sequence[Sequence[float]], power: int) -> RowTotal:
    """Add up rows, each of ROW_NUMEL floats, with one rounding."""
    scales = [2.0 ** (-power * exponent) for exponent in _GROUP_EXPONENTS]
    terms = [
        row[column + group] * scale
        for row in rows
        for group, scale in enumerate(scales)
        for column in (0, _LOWS)
    ]
    return RowTotal(
        pow_sum=math.fsum(terms),
        max_abs=max((row[_EXTREMES] for row in rows), default=0.0),
        num_nan=int(sum(row[_EXTREMES + 1] for row in rows)),
        num_inf=int(sum(row[_EXTREMES + 2] for row in rows)),
    )
