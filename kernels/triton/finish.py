"""Reduced lanes to the total norm, the clip coefficient and a flag, without leaving the device.

Contract
    Input: the buffer after the reduce, lists of the lanes in it that make up a norm each, and this
    rank's header before the reduce.
    Output: for each list float32 [norm, coefficient, nonfinite], the last 1 if the norm is NaN or
    infinite for an element's sake, else 0. Where the header does not prove that all ranks asked for
    the same and none failed: [NaN, 1, 0], so that nothing is scaled.
    Accumulator: digits are added in int32, exactly; the 56 leading bits or more make a pair.
    Error: the norm is within 0.5 + 2^-20 ulp of the lanes' exact one, subnormal ones too where
    the device keeps them. The coefficient is min(1, max_norm * (1 / (norm + 1e-6))), torch's
    operations in torch's order, the division within 0.5 + 2^-22 ulp for norms below 2^90, above
    as the device divides; of norms over 2^126 it is 0 on a device without subnormals.
    Tail: digits are masked.
    Limits: 64 lanes per list. Aliasing: the pointers must be of different memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import add_to_pair, exponent_above, power_of_two, split

__all__ = ["finish_kernel"]

GRID_EXPONENT = tl.constexpr(-1074)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def leading_pair(digits, index, DIGIT_BITS: tl.constexpr, NUM_LEADING: tl.constexpr):
    """Return (high, low, exponent): the number with these int32 digits as pair * 2^exponent.

    The pair is 0, or from 2^-2 to 2^31: balanced digits take less than 3/4 of the leading one.
    """
    leading = tl.max(tl.where(digits != 0, index, 0), axis=0)
    high = 0.0
    low = 0.0
    for k in tl.static_range(NUM_LEADING):
        digit = tl.sum(tl.where(index == leading - k, digits, 0), axis=0)
        upper = digit >> 12  # a sum over lanes may have more bits than a float32
        lower = digit - (upper << 12)
        high, low = add_to_pair(high, low, upper.to(tl.float32) * 2.0 ** (12 - k * DIGIT_BITS))
        high, low = add_to_pair(high, low, lower.to(tl.float32) * 2.0 ** (-k * DIGIT_BITS))
    return high, low, leading * DIGIT_BITS + GRID_EXPONENT


@triton.jit
def root_of_pair(high, low):
    """Return sqrt(high + low) as a sum of two floats, within 2^-22 ulp of the first; 0 of 0.

    One step of Newton from an approximate root, with the exact square of that.
    """
    root = tl.sqrt(high)
    a, b = split(root)
    rest = (((high - a * a) - (a + a) * b) - b * b) + low
    safe = tl.where(root > 0.0, root, 1.0)
    return root, tl.where(root > 0.0, rest / (safe + safe), 0.0)


@triton.jit
def round_pair(high, low, exponent):
    """Return (high + low) * 2^exponent, rounded once; high is 0 or from 2^-2 to 2^31.

    What will be subnormal is rounded here to a multiple of 2^-149, not to 24 bits first.
    """
    rounded = high + low
    unit = power_of_two(tl.minimum(-149 - exponent, 60))
    shift = unit * 12582912.0  # 1.5 * 2^23
    kept = (high + shift) - shift
    rest = high - kept
    above = (rest - unit * 0.5) + low
    below = (rest + unit * 0.5) + low
    kept = tl.where(above > 0.0, kept + unit, tl.where(below < 0.0, kept - unit, kept))
    rounded = tl.where(exponent_above(rounded) + exponent <= -126, kept, rounded)
    half = exponent >> 1
    return rounded * power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def reciprocal(x):
    """Return 1 / x, rounded once but for an error of 2^-22 ulp; x > 0.

    Backends divide by approximation unless told otherwise, and not all can be told (triton-ascend
    3.2 lowers no `tl.div_rn`). One step of Newton with the exact product, where that stays within
    the range of float32.
    """
    y = 1.0 / x
    a, b = split(x)
    c, d = split(y)
    rest = (((1.0 - a * c) - a * d) - b * c) - b * d
    return tl.where((x > 2.0**-90) & (x < 2.0**90), y + y * rest, y)


@triton.jit
def is_agreed(
    header_ptr,
    own_header_ptr,
    index,
    HEADER_NUMEL: tl.constexpr,
    NUM_VOTES: tl.constexpr,
    ERROR_VOTE: tl.constexpr,
    NUM_ADDENDS: tl.constexpr,
):
    """Tell whether a reduced header is what ranks make of it that all brought this rank's own.

    A sum of v and one of v^2 prove that all v are equal, or the maxima of v and -v do.
    """
    within = index < HEADER_NUMEL
    header = tl.load(header_ptr + index, mask=within, other=0.0)
    own = tl.load(own_header_ptr + index, mask=within, other=0.0)
    votes = (index > 0) & (index <= NUM_VOTES)
    expected = tl.where(votes, header, own * NUM_ADDENDS)
    expected = tl.where(index == ERROR_VOTE, 0.0, expected)
    return tl.max(tl.where(header != expected, 1.0, 0.0), axis=0) == 0.0


@triton.jit
def finish_kernel(
    buffer_ptr,
    own_header_ptr,
    lists_ptr,
    results_ptr,
    max_norm,
    POWER: tl.constexpr,
    HEADER_NUMEL: tl.constexpr,
    NUM_VOTES: tl.constexpr,
    ERROR_VOTE: tl.constexpr,
    NUM_ADDENDS: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    NUM_LEADING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write [norm, coefficient, nonfinite] of one list per program.

    Args:
        buffer_ptr: float32, reduced.
        own_header_ptr: float32 [HEADER_NUMEL], as this rank brought it.
        lists_ptr: int64: for each program where its list begins and ends, counted from here; then
            the lists: where each lane begins in the buffer.
        results_ptr: float32 [number of programs, 3].
        max_norm: float32; negative to measure only, then the coefficient is 1.
        POWER: 2 or 1 for lanes under SUM, 0 for the maxima under MAX.
        HEADER_NUMEL: At most BLOCK.
        NUM_VOTES: Places of the header, from 1 on, where ranks may differ.
        ERROR_VOTE: The one of these that is not 0 if a rank failed.
        NUM_ADDENDS: Times that what all ranks brought is in what was reduced: the number of ranks
            under SUM, 1 under MAX.
        NUM_DIGITS: Of a lane, at most BLOCK.
        DIGIT_BITS: w.
        NUM_LEADING: Digits that hold 56 bits below the leading one.
        BLOCK: A power of two.
    """
    index = tl.arange(0, BLOCK)
    digits = tl.zeros((BLOCK,), dtype=tl.int32)
    largest = 0.0
    num_nan = 0.0
    num_inf = 0.0
    program = tl.program_id(0)
    begin = tl.load(lists_ptr + 2 * program).to(tl.int32)
    end = tl.load(lists_ptr + 2 * program + 1).to(tl.int32)
    for i in range(begin, end):
        lane_ptr = buffer_ptr + tl.load(lists_ptr + i)
        num_nan += tl.load(lane_ptr)
        num_inf += tl.load(lane_ptr + 1)
        if POWER > 0:
            addend = tl.load(lane_ptr + 2 + index, mask=index < NUM_DIGITS, other=0.0)
            digits += addend.to(tl.int32)
        else:
            value = tl.load(lane_ptr + 2)
            largest = tl.where(value > largest, value, largest)
    if POWER == 0:
        norm = largest
    else:
        high, low, exponent = leading_pair(digits, index, DIGIT_BITS, NUM_LEADING)
        if POWER == 2:
            odd = exponent & 1
            factor = tl.where(odd == 1, 2.0, 1.0)
            high, low = root_of_pair(high * factor, low * factor)
            exponent = (exponent - odd) >> 1
        norm = round_pair(high, low, exponent)
    norm = tl.where(num_inf > 0.0, INFINITY, norm)
    norm = tl.where(num_nan != 0.0, float("nan"), norm)  # NaN != 0
    coefficient = reciprocal(norm + 1e-6) * max_norm
    coefficient = tl.where(coefficient > 1.0, 1.0, coefficient)
    coefficient = tl.where(max_norm < 0.0, 1.0, coefficient)
    nonfinite = tl.where((num_nan != 0.0) | (num_inf > 0.0), 1.0, 0.0)
    agreed = is_agreed(
        buffer_ptr, own_header_ptr, index, HEADER_NUMEL, NUM_VOTES, ERROR_VOTE, NUM_ADDENDS
    )
    result_ptr = results_ptr + 3 * program
    tl.store(result_ptr, tl.where(agreed, norm, float("nan")))
    tl.store(result_ptr + 1, tl.where(agreed, coefficient, 1.0))
    tl.store(result_ptr + 2, tl.where(agreed, nonfinite, 0.0))
