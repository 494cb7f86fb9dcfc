"""Kernels that Ascend's compiler must refuse, so that its refusals are known to be noticed."""

import triton
import triton.language as tl

__all__ = ["sum_float64_kernel"]


@triton.jit
def sum_float64_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Add up squares in float64, which Ascend's vector cores do not have."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(x * x, axis=0))
