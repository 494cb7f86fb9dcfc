"""What `partial_norms` says of each segment, as the host reads it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_ROWS_PER_LANE",
    "MAX_TENSORS_PER_LANE",
    "ROW_NUMEL",
    "RangeTotals",
    "totals_of_ranges",
]

ROW_NUMEL = 24
"""Floats per row: 8 for the sums of the groups, of which 3 are used, 8 for what these leave, 8 for
largest magnitude, NaN count, infinity count."""

MAX_ROWS_PER_LANE = 32768
"""What `encode` can add up without its digits leaving int32."""

MAX_TENSORS_PER_LANE = MAX_ROWS_PER_LANE // 2
"""How many tensors never have more rows than that; segments.py cuts them accordingly."""

# Log2 of what the elements of each group were scaled by.
_GROUP_EXPONENTS = (75, 0, -90)
_SUMS = slice(0, 3)
_LOWS = slice(8, 11)
_MAX_ABS = 16
_COUNTS = slice(17, 19)


class RangeTotals(NamedTuple):
    """What ranges of rows say, such as those of a tensor.

    Attributes:
        values: For each range the sum of |x|^power, or the largest |x| if power is 0; 0 where
            there is a NaN or an infinity.
        nonfinite: NaN and infinite elements of the ranges that have any, by place.
    """

    values: list[float]
    nonfinite: dict[int, tuple[int, int]]


def totals_of_ranges(
    rows: torch.Tensor, ranges: Sequence[tuple[int, int]], power: int
) -> RangeTotals:
    """Take rows together, range by range; sums are right to 2^-50, however many rows there are.

    Args:
        rows: float32 [number of rows, ROW_NUMEL] on the host.
        ranges: First row of each range, and the one after its last.
        power: Of the elements that were summed, 2 or 1; 0 for maxima, which rows of any power have.
    """
    wide = rows.double()
    if power:
        scales = torch.tensor(
            [2.0 ** (-power * exponent) for exponent in _GROUP_EXPONENTS],
            dtype=torch.float64,
            device="cpu",
        )
        sums = ((wide[:, _SUMS] + wide[:, _LOWS]) * scales).sum(1).tolist()
        values = [math.fsum(sums[begin:end]) for begin, end in ranges]
    else:
        maxima = wide[:, _MAX_ABS].tolist()
        values = [max(maxima[begin:end], default=0.0) for begin, end in ranges]
    nonfinite = {}
    if wide[:, _COUNTS].any():
        counts = [list(map(int, column)) for column in wide[:, _COUNTS].t().tolist()]
        for i, (begin, end) in enumerate(ranges):
            num_nan, num_inf = (sum(column[begin:end]) for column in counts)
            if num_nan or num_inf:
                nonfinite[i] = num_nan, num_inf
                values[i] = 0.0
    return RangeTotals(values, nonfinite)
