"""Float32 arithmetic without rounding errors, for kernels on devices that have no float64.

All of it survives the contraction of `a * b + c` into one fused operation, which compilers do as
they please: each product here is exact, so that fusing it changes nothing. It does not survive
"fast math", which no Triton backend turns on by itself.

A *pair* is two floats whose sum is meant, the second at most half a unit in the last place of the
first: 48 bits, with float32's range of exponents.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_to_pair", "exponent_above", "power_of_two", "split", "sum_in_levels"]


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent as float32; int32, clamped to the normal numbers, -126 to 127."""
    clamped = tl.minimum(tl.maximum(exponent, -126), 127)
    return ((clamped + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_above(value):
    """Return the least e >= -126 with value < 2^e, of a float32 >= 0."""
    return (value.to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def split(x):
    """Return (high, low): x = high + low, of 12 bits each, so that their products are exact."""
    high = (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def add_to_pair(high, low, term):
    """Return the pair (high, low) + term, rounded to 2^-48 (Knuth's and Dekker's sums)."""
    total = high + term
    shifted = total - high
    error = (high - (total - shifted)) + (term - shifted)
    low = low + error
    high = total + low
    return high, low - (high - total)


@triton.jit
def sum_in_levels(
    first, second, third, coarse, medium, fine, SECOND: tl.constexpr, THIRD: tl.constexpr
):
    """Return the sum over all elements of `first`, and of the others if told so, as a pair.

    Each level keeps of its elements what are multiples of 2^-24 times a power of two, so few bits
    that their sum is exact in any order, and hands the rest on (Rump, Ogita and Oishi, "Accurate
    floating-point summation", SIAM J. Sci. Comput. 31, 2008). Only the last rests, of at most
    2^-24 * fine each, are summed with rounding.

    Args:
        first: float32 tensor; its magnitudes sum to at most `coarse`.
        second: Alike; its magnitudes, and rests of 2^-24 * coarse, sum to at most `medium`.
        third: Alike; its magnitudes, and rests of 2^-23 * medium, sum to at most `fine`.
        coarse: A power of two.
        medium: A power of two.
        fine: A power of two.
        SECOND: Whether to add `second`.
        THIRD: Whether to add `third`.
    """
    kept = (first + coarse) - coarse
    sum_coarse = tl.sum(kept, axis=0)
    rest = first - kept
    kept = (rest + medium) - medium
    rest = rest - kept
    if SECOND:
        also_kept = (second + medium) - medium
        also_rest = second - also_kept
        kept = kept + also_kept
    sum_medium = tl.sum(kept, axis=0)
    kept = (rest + fine) - fine
    rest = rest - kept
    if SECOND:
        also_kept = (also_rest + fine) - fine
        rest = rest + (also_rest - also_kept)
        kept = kept + also_kept
    if THIRD:
        also_kept = (third + fine) - fine
        rest = rest + (third - also_kept)
        kept = kept + also_kept
    sum_fine = tl.sum(kept, axis=0)
    high, low = add_to_pair(sum_coarse, 0.0, sum_medium)
    high, low = add_to_pair(high, low, sum_fine)
    return add_to_pair(high, low, tl.sum(rest, axis=0))
