"""Exact references: sums as fractions, correct rounding by comparison of squares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import torch


def exact_pow_sum(tensors: Iterable[torch.Tensor], p: int = 2) -> Fraction:
    """Return sum(|x|^p) of all elements without any rounding; p a positive integer."""
    total = Fraction(0)
    for tensor in tensors:
        if tensor.is_complex():
            assert p == 2
            tensor = torch.view_as_real(tensor)
        for value in tensor.detach().double().flatten().tolist():
            total += abs(Fraction(value)) ** p
    return total


def assert_rounds_sqrt(norm: torch.Tensor, pow_sum: Fraction) -> None:
    """Assert that `norm` is sqrt(pow_sum) rounded to nearest in its own dtype."""
    value = Fraction(norm.item())
    below, above = (
        Fraction(torch.nextafter(norm, torch.full_like(norm, toward)).item())
        for toward in (-math.inf, math.inf)
    )
    low, high = (value + below) / 2, (value + above) / 2
    assert low <= 0 or low**2 <= pow_sum, f"{norm.item()!r} is too large"
    assert pow_sum <= high**2, f"{norm.item()!r} is too small"


def error_in_ulp(norm: torch.Tensor, reference: float) -> float:
    """Return |norm - reference| in units of the last place of `reference` in norm's dtype."""
    rounded = torch.tensor(reference, dtype=norm.dtype)
    ulp = torch.nextafter(rounded, torch.tensor(math.inf, dtype=norm.dtype)) - rounded
    return abs(norm.item() - reference) / ulp.item()
