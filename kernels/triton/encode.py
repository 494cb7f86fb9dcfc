"""Rows of partial norms to the digits of the wire format, added to what the host has encoded.

Contract
    Input: rows of `partial_norms`, sorted by lane; the buffer that came up from the host, header
    and lanes of float32 integers (wire_format.py), or a constant one.
    Output: a buffer of the same layout with the rows added: digits under SUM, flags and maxima
    under MAX; in the header the votes for what only the device knows.
    Accumulator: rows of a group in levels and pairs, 1024 at a time, error below 2^-42 of the sum
    at worst and 2^-47 for errors of either sign; digits in int32, exact.
    Digits are balanced after one carry, from -2^(w-1) - 2^8 to 2^(w-1) + 2^8, so that their
    magnitudes stay within 2^w and sums over the ranks within 2^24.
    Tail: rows and digits are masked.
    Limits: 32768 rows per lane, 10 <= w <= 23, hence groups of 2 to 2^14 ranks.
    Aliasing: incoming and outgoing buffer must be different.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import exponent_above, power_of_two, sum_in_levels

__all__ = ["encode_kernel"]

ROW = tl.constexpr(24)
ROWS = tl.constexpr(1024)  # at a time
GRID_EXPONENT = tl.constexpr(-1074)
HUGE = tl.constexpr(2.0**75)  # of elements up to it, 2^53 are needed for an infinite norm


@triton.jit
def digits_of(value, exponent, index, DIGIT_BITS: tl.constexpr):
    """Return the base-2^DIGIT_BITS digits of value * 2^exponent at `index` of the grid, int32.

    All carry the sign of `value`, a float32 scalar.
    """
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    biased = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) + tl.where(biased > 0, 0x800000, 0)
    lowest_bit = tl.maximum(biased, 1) - 150 + exponent - GRID_EXPONENT
    shift = lowest_bit - index * DIGIT_BITS
    shift = tl.where(shift < DIGIT_BITS, shift, -126)
    # In units of the digit, and without what belongs to the digits above; both exact.
    units = significand.to(tl.float32) * power_of_two(shift)
    above = (units * 2.0**-DIGIT_BITS).to(tl.int32).to(tl.float32) * 2.0**DIGIT_BITS
    digits = (units - above).to(tl.int32)
    return tl.where(value < 0.0, -digits, digits)


@triton.jit
def carry_out(digits, DIGIT_BITS: tl.constexpr):
    """Return what a digit hands to the next one, so that from -2^(w-1) to 2^(w-1) - 1 stays."""
    return (digits + 2 ** (DIGIT_BITS - 1)) >> DIGIT_BITS


@triton.jit
def encode_sums(
    rows_ptr,
    begin,
    end,
    incoming_ptr,
    outgoing_ptr,
    POWER: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add rows `begin` to `end` to the lane at `incoming_ptr`."""
    index = tl.arange(0, BLOCK)
    incoming = tl.load(incoming_ptr + 2 + index, mask=index < NUM_DIGITS, other=0.0)
    digits = incoming.to(tl.int32)
    within = (index > 0) & (index <= NUM_DIGITS)
    below = tl.load(incoming_ptr + 1 + index, mask=within, other=0.0).to(tl.int32)
    num_nan = tl.load(incoming_ptr)
    num_inf = tl.load(incoming_ptr + 1)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = row < end
        row_ptr = rows_ptr + row * ROW
        num_nan += tl.sum(tl.load(row_ptr + 17, mask=mask, other=0.0), axis=0)
        num_inf += tl.sum(tl.load(row_ptr + 18, mask=mask, other=0.0), axis=0)
        for group in range(3):
            highs = tl.load(row_ptr + group, mask=mask, other=0.0)
            lows = tl.load(row_ptr + 8 + group, mask=mask, other=0.0)
            above = exponent_above(tl.max(highs, axis=0))
            high, low = sum_in_levels(
                highs,
                lows,
                lows,
                power_of_two(above + 10),
                power_of_two(above - 3),
                power_of_two(above - 16),
                True,
                False,
            )
            # What `partial_norms` scaled the group's elements by, taken back.
            exponent = POWER * tl.where(group == 0, -75, tl.where(group == 1, 0, 90))
            digits += digits_of(high, exponent, index, DIGIT_BITS)
            digits += digits_of(low, exponent, index, DIGIT_BITS)
            below += digits_of(high, exponent, index - 1, DIGIT_BITS)
            below += digits_of(low, exponent, index - 1, DIGIT_BITS)
    carried = carry_out(digits, DIGIT_BITS)
    digits = digits - (carried << DIGIT_BITS) + carry_out(below, DIGIT_BITS)
    tl.store(outgoing_ptr + 2 + index, digits.to(tl.float32), mask=index < NUM_DIGITS)
    most = 2.0**DIGIT_BITS - 1.0
    tl.store(outgoing_ptr, tl.where(num_nan < most, num_nan, most))
    tl.store(outgoing_ptr + 1, tl.where(num_inf < most, num_inf, most))


@triton.jit
def extremes_of_rows(rows_ptr, begin, end):
    """Return largest magnitude, NaN count and infinity count over rows."""
    largest = 0.0
    num_nan = 0.0
    num_inf = 0.0
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = row < end
        row_ptr = rows_ptr + row * ROW
        most = tl.max(tl.load(row_ptr + 16, mask=mask, other=0.0), axis=0)
        largest = tl.where(most > largest, most, largest)
        num_nan += tl.sum(tl.load(row_ptr + 17, mask=mask, other=0.0), axis=0)
        num_inf += tl.sum(tl.load(row_ptr + 18, mask=mask, other=0.0), axis=0)
    return largest, num_nan, num_inf


@triton.jit
def encode_kernel(
    rows_ptr,
    ranges_ptr,
    incoming_ptr,
    outgoing_ptr,
    num_lanes,
    num_rows,
    POWER: tl.constexpr,
    HEADER_NUMEL: tl.constexpr,
    NONFINITE_VOTE: tl.constexpr,
    HUGE_VOTE: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one lane per program, and the header with the program after the last lane's.

    Args:
        rows_ptr: float32 [num_rows, 24].
        ranges_ptr: int64 [num_lanes, 2]: the first row of each lane, and the one after its last.
        incoming_ptr: float32 [HEADER_NUMEL + num_lanes * (2 + NUM_DIGITS)].
        outgoing_ptr: Alike.
        num_lanes: int32; the grid has one program more.
        num_rows: int32.
        POWER: 2 or 1 for lanes under SUM, 0 for the maxima under MAX.
        HEADER_NUMEL: At most BLOCK.
        NONFINITE_VOTE: Place in the header; set if any row counts a NaN or an infinity.
        HUGE_VOTE: Alike; set if the norm may overflow float32.
        NUM_DIGITS: Of a lane, less than BLOCK.
        DIGIT_BITS: w.
        BLOCK: A power of two.
    """
    lane = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    if lane < num_lanes:
        begin = tl.load(ranges_ptr + 2 * lane).to(tl.int32)
        end = tl.load(ranges_ptr + 2 * lane + 1).to(tl.int32)
        start = HEADER_NUMEL + lane * (2 + NUM_DIGITS)
        if POWER > 0:
            encode_sums(
                rows_ptr,
                begin,
                end,
                incoming_ptr + start,
                outgoing_ptr + start,
                POWER,
                NUM_DIGITS,
                DIGIT_BITS,
                BLOCK,
            )
        else:
            largest, num_nan, num_inf = extremes_of_rows(rows_ptr, begin, end)
            mask = index < 2 + NUM_DIGITS
            values = tl.load(incoming_ptr + start + index, mask=mask, other=0.0)
            own = tl.where(index == 0, tl.where(num_nan > 0.0, 1.0, 0.0), 0.0)
            own = tl.where(index == 1, tl.where(num_inf > 0.0, 1.0, 0.0), own)
            own = tl.where(index == 2, largest, own)
            tl.store(outgoing_ptr + start + index, tl.where(own > values, own, values), mask=mask)
    else:
        largest, num_nan, num_inf = extremes_of_rows(rows_ptr, 0, num_rows)
        votes = tl.load(incoming_ptr + index, mask=index < HEADER_NUMEL, other=0.0)
        nonfinite = tl.where(num_nan + num_inf > 0.0, 1.0, 0.0)
        votes = tl.where((index == NONFINITE_VOTE) & (votes < nonfinite), nonfinite, votes)
        huge = tl.where(largest > HUGE, 1.0, 0.0)
        votes = tl.where((index == HUGE_VOTE) & (votes < huge), huge, votes)
        tl.store(outgoing_ptr + index, votes, mask=index < HEADER_NUMEL)
