"""Lane totals to the total norm and the clip coefficient, each rounded once.

A lane total of a finite norm type is an integer count of `2 ** GRID_EXPONENT`, the smallest
subnormal float64, so that adding totals is exact. Root and rounding happen here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "GRID_EXPONENT",
    "LaneTotal",
    "clip_coefficient",
    "may_overflow",
    "round_norm",
    "sum_totals",
]

GRID_EXPONENT = -1074


@dataclass(frozen=True)
class LaneTotal:
    """Partial norms of any number of ranks, combined.

    Attributes:
        grid_sum: Sum of |g|^p (or the count of nonzeros, p = 0) in units of 2^GRID_EXPONENT;
            0 for the norm types inf and -inf.
        extremum: The max (inf) or min (-inf) of |g|; 0.0 for finite norm types.
        num_nan: NaN elements, or a positive number where only their presence is known.
        num_inf: Infinite elements, alike.
    """

    grid_sum: int = 0
    extremum: float = 0.0
    num_nan: int = 0
    num_inf: int = 0


def sum_totals(totals: Iterable[LaneTotal | None], norm_type: float) -> LaneTotal:
    """Combine totals of disjoint sets of elements, exactly and in any order; None is no total.

    With no totals this is the norm of nothing: 0, and inf for the norm type -inf.
    """
    known = [total for total in totals if total is not None]
    smallest = norm_type == -math.inf
    extrema = [total.extremum for total in known]
    return LaneTotal(
        grid_sum=sum(total.grid_sum for total in known),
        extremum=min(extrema, default=math.inf) if smallest else max(extrema, default=0.0),
        num_nan=sum(total.num_nan for total in known),
        num_inf=sum(total.num_inf for total in known),
    )


def round_norm(total: LaneTotal, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm as a 0-dim CPU tensor of `dtype` (float32 or float64).

    For p = 2, 1, 0 and +-inf the value is the exact one, rounded once to nearest even. For other p
    the root is taken in float64: its relative error is below |log2(sum)| / p * 2^-52, that is
    under 2^-41 for p >= 1, before the rounding to `dtype`.
    """
    if total.num_nan:
        norm = math.nan
    elif total.num_inf:
        norm = math.inf
    elif math.isinf(norm_type):
        norm = total.extremum
    elif norm_type == 2.0:
        norm = _round_sqrt(total.grid_sum, dtype)
    elif norm_type in (0.0, 1.0):
        norm = _round_scaled(total.grid_sum, GRID_EXPONENT, dtype)
    else:
        norm = _root(total.grid_sum, norm_type)
    return torch.tensor(norm, dtype=dtype, device="cpu")


def may_overflow(total: LaneTotal, norm_type: float, num_ranks: int) -> bool:
    """Tell whether `num_ranks` totals, none larger than this one, may have an infinite norm."""
    if math.isinf(norm_type):
        return norm_type > 0 and total.extremum > torch.finfo(torch.float32).max
    together = LaneTotal(grid_sum=total.grid_sum * num_ranks)
    return bool(round_norm(together, norm_type, torch.float32).isinf())


def clip_coefficient(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return min(1, max_norm / (total_norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ does.

    In the dtype of `total_norm`, with torch's own order of operations, so that the bits are
    torch's. `max_norm=inf` measures only: the coefficient is 1, whatever the norm.
    """
    if max_norm == math.inf:
        return torch.ones_like(total_norm)
    coef: torch.Tensor = max_norm / (total_norm + 1e-6)
    return torch.clamp(coef, max=1.0)


def _round_sqrt(grid_sum: int, dtype: torch.dtype) -> float:
    """Correctly round sqrt(grid_sum * 2^GRID_EXPONENT): integer root, then one rounding."""
    # The root needs two bits more than the significand: one to round, one so that the rest,
    # which only says "there is more", never decides alone.
    wanted_bits = 2 * (_significand_bits(dtype) + 2)
    double_shift = 2 * max(0, (wanted_bits - grid_sum.bit_length() + 1) // 2)
    radicand = grid_sum << double_shift
    root = math.isqrt(radicand)
    return _round_scaled(
        root, (GRID_EXPONENT - double_shift) // 2, dtype, inexact=root * root != radicand
    )


def _round_scaled(n: int, exponent: int, dtype: torch.dtype, *, inexact: bool = False) -> float:
    """Round n * 2^exponent to nearest even in `dtype`; `inexact` says a bit more follows n."""
    info = torch.finfo(dtype)
    smallest_exponent = round(math.log2(info.smallest_normal)) - (_significand_bits(dtype) - 1)
    last_place = max(exponent + n.bit_length() - _significand_bits(dtype), smallest_exponent)
    drop = last_place - exponent
    if drop <= 0:
        return math.ldexp(n, exponent)
    kept, rest, half = n >> drop, n & ((1 << drop) - 1), 1 << (drop - 1)
    if rest > half or (rest == half and (inexact or kept & 1)):
        kept += 1
    if kept.bit_length() + last_place > 1024:
        return math.inf
    value = math.ldexp(kept, last_place)
    return math.inf if value > info.max else value


def _root(grid_sum: int, norm_type: float) -> float:
    """Return (grid_sum * 2^GRID_EXPONENT) ** (1 / norm_type) in float64."""
    bits = grid_sum.bit_length()
    log2_root = (bits + GRID_EXPONENT) / norm_type
    if grid_sum == 0 or log2_root < 2 * GRID_EXPONENT:
        return 0.0
    if log2_root > -2 * GRID_EXPONENT:
        return math.inf
    # In [0.5, 1): int / int is correctly rounded whatever the sizes.
    fraction = grid_sum / (1 << bits)
    whole = math.floor(log2_root)
    scale: float = 2.0 ** (log2_root - whole)
    root: float = fraction ** (1.0 / norm_type) * scale
    try:
        return math.ldexp(root, whole)
    except OverflowError:
        return math.inf


def _significand_bits(dtype: torch.dtype) -> int:
    return {torch.float32: 24, torch.float64: 53}[dtype]
