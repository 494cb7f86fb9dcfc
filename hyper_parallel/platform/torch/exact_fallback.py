"""Exact sums of squares with torch operators, for where there are no host kernels.

A float32 is a whole significand below 2^24 times a power of two, so its square is a whole number
below 2^48; squares are added up as integers, apart for each exponent.
"""

from __future__ import annotations

import torch

from hyper_parallel.kernels.host import ExactSum

__all__ = ["exact_sum_of_squares"]

_FRACTION_BITS = 23
_NUM_EXPONENTS = 256
_HALF_BITS = 24  # halves of squares, so that 2^39 of them fit an int64


def exact_sum_of_squares(chunk: torch.Tensor) -> ExactSum:
    """Return the sum over a CPU tensor of float32, bfloat16, float16 or complex pairs of them."""
    if chunk.is_complex():
        chunk = torch.view_as_real(chunk.resolve_conj())
    bits = chunk.reshape(-1).float().view(torch.int32)
    exponents = bits >> _FRACTION_BITS & _NUM_EXPONENTS - 1
    fractions = bits & (1 << _FRACTION_BITS) - 1
    special = exponents == _NUM_EXPONENTS - 1
    if special.any():
        num_nan = int((fractions[special] != 0).sum())
        return ExactSum(0, num_nan, int(special.sum()) - num_nan)
    significands = (fractions + (exponents > 0).int() * (1 << _FRACTION_BITS)).long()
    squares = significands * significands
    units = 0
    for shift, halves in (
        (0, squares & (1 << _HALF_BITS) - 1),
        (_HALF_BITS, squares >> _HALF_BITS),
    ):
        zeros = torch.zeros(_NUM_EXPONENTS, dtype=torch.int64, device="cpu")
        sums = zeros.index_add_(0, exponents, halves)
        # Exponents 0, of subnormals, and 1 share the unit 2^-149 of EXACT_EXPONENT's square root.
        for exponent, total in enumerate(sums.tolist()):
            units += total << shift + 2 * max(exponent - 1, 0)
    return ExactSum(units, 0, 0)
