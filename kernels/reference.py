"""What the device kernels must compute, in exact or float64 arithmetic on the CPU.

For tests and for the check on real devices: slow, and written apart from the kernels, so that no
mistake is in both.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "GRID_EXPONENT",
    "Finished",
    "Measured",
    "decode_lane",
    "finish",
    "partial_norms",
    "pow_sum64",
    "scale",
]

GRID_EXPONENT = -1074
"""Digits count units of 2 to this power, the smallest float64."""


class Measured(NamedTuple):
    """What `partial_norms` says of a tensor.

    Attributes:
        pow_sum: Sum of |x|^power of the finite elements, exact.
        max_abs: The largest of them; 0 if there are none.
        num_nan: NaN elements.
        num_inf: Infinite elements.
    """

    pow_sum: Fraction
    max_abs: float
    num_nan: int
    num_inf: int


class Finished(NamedTuple):
    """What `finish` says.

    Attributes:
        norm: Rounded to float32 once, to nearest even.
        coefficient: As torch computes it from `norm`, in float32.
        nonfinite: 1 if an element was NaN or infinite.
    """

    norm: float
    coefficient: float
    nonfinite: float


def partial_norms(tensor: torch.Tensor, power: int) -> Measured:
    """Measure one tensor exactly; power 2 or 1, or 0 for a sum of 0."""
    wide = tensor.detach().cpu().double().flatten()
    finite = wide[wide.isfinite()].abs()
    values = finite.tolist() if power else ()
    return Measured(
        pow_sum=sum((Fraction(value) ** power for value in values), Fraction(0)),
        max_abs=finite.max().item() if finite.numel() else 0.0,
        num_nan=int(wide.isnan().sum()),
        num_inf=int(wide.isinf().sum()),
    )


def pow_sum64(tensor: torch.Tensor, power: int) -> float:
    """Return the sum of |x|^power in float64, for tensors too long for fractions.

    Squares of the kernels' dtypes are exact in float64; chunks of 2^16 are added by dot products
    and these by `math.fsum`: the relative error is below 2^-37 at worst, 2^-45 in practice.
    """
    chunks = torch.split(tensor.detach().flatten(), 1 << 16)
    wide = (chunk.double() for chunk in chunks)
    parts = (torch.dot(x, x) if power == 2 else x.abs().sum() for x in wide)
    return math.fsum(torch.stack(list(parts)).tolist())


def decode_lane(lane: Sequence[float], digit_bits: int) -> Fraction:
    """Return the sum that the digits of a lane stand for; they may be negative."""
    total = 0
    for digit in reversed(lane[2:]):
        total = (total << digit_bits) + int(digit)
    return total * Fraction(2) ** GRID_EXPONENT


def finish(
    lanes: Iterable[Sequence[float]], power: int, digit_bits: int, max_norm: float
) -> Finished:
    """Return the norm of all lanes together; power 0 stands for the largest magnitude."""
    lanes = list(lanes)
    num_nan = sum(lane[0] for lane in lanes)
    num_inf = sum(lane[1] for lane in lanes)
    total = sum((decode_lane(lane, digit_bits) for lane in lanes), Fraction(0)) if power else None
    if num_nan != 0:
        norm = torch.tensor(math.nan)
    elif num_inf:
        norm = torch.tensor(math.inf)
    elif total is None:
        norm = torch.tensor(max((lane[2] for lane in lanes), default=0.0))
    else:
        norm = torch.tensor(_round_root(total, power), dtype=torch.float64).float()
    coefficient = torch.ones(()) if max_norm == math.inf else max_norm / (norm + 1e-6)
    coefficient = coefficient.clamp(max=1.0)
    return Finished(norm.item(), coefficient.item(), float(num_nan != 0 or num_inf > 0))


def scale(tensor: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the tensor times a float32, in float32, rounded once; the same if that is 1."""
    if coefficient == 1.0:
        return tensor.clone()
    return (tensor.float() * torch.tensor(coefficient)).to(tensor.dtype)


def _round_root(total: Fraction, power: int) -> float:
    """Return total^(1/power) as a float64 that rounds to float32 as the exact value does.

    The root of an integer with far more bits than float32 has, its last bit set where it is not
    exact, so that it is never taken for a tie.
    """
    if total == 0:
        return 0.0
    bits = 40 + (total.denominator.bit_length() - total.numerator.bit_length()) // power
    scaled = total * Fraction(4) ** bits if power == 2 else total * Fraction(2) ** bits
    whole = scaled.numerator // scaled.denominator
    root = math.isqrt(whole) if power == 2 else whole
    is_exact = root**power * scaled.denominator == scaled.numerator
    return math.ldexp(root if is_exact else root | 1, -bits)
