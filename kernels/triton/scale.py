"""Multiply any number of device tensors of one dtype by the clip coefficient, in one launch.

Contract
    Input: the segments of `partial_norms`, written in place; the coefficient, on the device, so
    that the host need not know it.
    Where the coefficient is 1 nothing is read or written. Else each element is multiplied in
    float32 and rounded once, to nearest even.
    Tail: masked; not written.
    Order, number of programs: without effect.
    Limits: as for `partial_norms`. Aliasing: segments must not overlap; the coefficient must not
    lie in them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["scale_kernel"]


@triton.jit
def scale_kernel(
    base_ptr,
    segments_ptr,
    coefficient_ptr,
    num_segments,
    ALIGNMENT: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
):
    """Scale each segment in place.

    Args:
        base_ptr: See `partial_norms_kernel`, as for the other arguments.
        segments_ptr: See there.
        coefficient_ptr: float32 [1].
        num_segments: int32.
        ALIGNMENT: See there.
        LOG2_BLOCK: See there.
    """
    BLOCK: tl.constexpr = 2**LOG2_BLOCK
    element = tl.arange(0, BLOCK)
    coefficient = tl.load(coefficient_ptr)
    end = tl.where(coefficient == 1.0, 0, num_segments)
    for segment in range(tl.program_id(0), end, tl.num_programs(0)):
        offset = tl.load(segments_ptr + 3 * segment)
        offset = tl.multiple_of(offset, ALIGNMENT)
        numel = tl.load(segments_ptr + 3 * segment + 1).to(tl.int32)
        for start in range(0, numel, BLOCK):
            mask = element < numel - start
            x_ptr = base_ptr + offset + start + element
            x = tl.load(x_ptr, mask=mask, other=0.0)
            scaled = x.to(tl.float32) * coefficient
            tl.store(x_ptr, scaled.to(x.dtype), mask=mask)
