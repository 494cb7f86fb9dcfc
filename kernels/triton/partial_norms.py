"""Partial norms of any number of device tensors of one dtype, in one launch.

Contract
    Input: float32, bfloat16 or float16, contiguous; any address that the dtype allows. Tensors are
    cut into segments (segments.py); an empty one has none. Only read.
    Output: one row of 24 float32 per segment (rows.py): the sum of |x| or x^2 as a pair in each
    of three groups, for blocks of tiny, ordinary and huge elements, which are scaled
    by 2^75, 1 and 2^-90 first, since a pair of floats has only float32's exponents (as LAPACK's
    nrm2 does by element); the largest magnitude; the counts of NaN and of infinite elements. A
    block of 2^LOG2_BLOCK elements with NaN or infinity adds to the counts only.
    Accumulator: per block the levels of `sum_in_levels`, blocks added as pairs. float32 squares
    are taken in 12-bit halves, exactly.
    Order: blocks of a segment in turn; within a block no order changes a bit but in the last
    level. Programs take segments in turn, and none depends on how many programs there are.
    Error of a row's sum: only the last level rounds, and blocks are added to 2^-48. Seen below
    2^-45 for normal, constant, spiked and random-bit data (tests/kernels/test_triton_numerics.py,
    which allows 2^-43); 2^-36 if all roundings of a tree conspired.
    Tail: masked with zeros, which add nothing to any column.
    Subnormals count fully where the device keeps them; an Ascend vector core may flush them.
    Limits: 2^24 elements per segment; 2^LOG2_BLOCK <= 4096, so that float32 fits an Ascend vector
    core's 192 KiB buffer (8192 overflows it) and no level overflows.
    Aliasing: the three pointers must be of different memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import add_to_pair, exponent_above, power_of_two, split, sum_in_levels

__all__ = ["partial_norms_kernel"]

INFINITY = tl.constexpr(0x7F800000)  # the bits of a float32; those of a NaN are larger


@triton.jit
def sum_of_block(x, top, POWER: tl.constexpr, HALF: tl.constexpr, LOG2_BLOCK: tl.constexpr):
    """Return the sum of x^POWER as a pair; x >= 0 float32, `top` the largest of them."""
    above = exponent_above(top) * POWER  # of the largest power
    coarse = power_of_two(above + LOG2_BLOCK)
    medium = power_of_two(above + LOG2_BLOCK - 10)
    fine = power_of_two(above + 2 * LOG2_BLOCK - 32)
    if POWER == 1:
        high, low = sum_in_levels(x, x, x, coarse, medium, fine, False, False)
    elif HALF:  # 11 bits, whose square is exact
        high, low = sum_in_levels(x * x, x, x, coarse, medium, fine, False, False)
    else:
        a, b = split(x)
        high, low = sum_in_levels(a * a, (a + a) * b, b * b, coarse, medium, fine, True, True)
    return high, low


@triton.jit
def partial_norms_kernel(
    base_ptr,
    segments_ptr,
    rows_ptr,
    num_segments,
    POWER: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
):
    """Fill the row of each segment.

    Args:
        base_ptr: Of the tensors' dtype; what segments are relative to.
        segments_ptr: int64 [num_segments, 3]: distance from `base_ptr` in elements, may be
            negative; number of elements; row.
        rows_ptr: float32 [number of rows, 24].
        num_segments: int32.
        POWER: 2 or 1; 0 leaves the sums out.
        HALF: Whether squares of the dtype are exact in float32.
        ALIGNMENT: Elements that each segment's distance from `base_ptr` is a multiple of.
        LOG2_BLOCK: 12 at most.
    """
    BLOCK: tl.constexpr = 2**LOG2_BLOCK
    column = tl.arange(0, 8)
    element = tl.arange(0, BLOCK)
    for segment in range(tl.program_id(0), num_segments, tl.num_programs(0)):
        offset = tl.load(segments_ptr + 3 * segment)
        offset = tl.multiple_of(offset, ALIGNMENT)
        numel = tl.load(segments_ptr + 3 * segment + 1).to(tl.int32)
        row = tl.load(segments_ptr + 3 * segment + 2)
        highs = tl.zeros((8,), dtype=tl.float32)
        lows = tl.zeros((8,), dtype=tl.float32)
        largest = 0
        num_nan = 0.0
        num_inf = 0.0
        for start in range(0, numel, BLOCK):
            mask = element < numel - start
            x = tl.load(base_ptr + offset + start + element, mask=mask, other=0.0).to(tl.float32)
            # As integers magnitudes have the order of the numbers, and no maximum drops a NaN.
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            most = tl.max(bits, axis=0)
            if most < INFINITY:
                largest = tl.maximum(largest, most)
                if POWER > 0:
                    top = most.to(tl.float32, bitcast=True)
                    group = tl.where(top < 2.0**-30, 0, tl.where(top < 2.0**40, 1, 2))
                    scale = tl.where(group == 0, 2.0**75, tl.where(group == 1, 1.0, 2.0**-90))
                    x = bits.to(tl.float32, bitcast=True) * scale
                    high, low = sum_of_block(x, top * scale, POWER, HALF, LOG2_BLOCK)
                    highs, lows = add_to_pair(highs, lows, tl.where(column == group, high, 0.0))
                    highs, lows = add_to_pair(highs, lows, tl.where(column == group, low, 0.0))
            else:
                num_nan += tl.sum(tl.where(bits > INFINITY, 1.0, 0.0), axis=0)
                num_inf += tl.sum(tl.where(bits == INFINITY, 1.0, 0.0), axis=0)
        row_ptr = rows_ptr + 24 * row + column
        tl.store(row_ptr, highs)
        tl.store(row_ptr + 8, lows)
        extra = tl.where(column == 0, largest.to(tl.float32, bitcast=True), 0.0)
        extra = tl.where(column == 1, num_nan, extra)
        extra = tl.where(column == 2, num_inf, extra)
        tl.store(row_ptr + 16, extra)
