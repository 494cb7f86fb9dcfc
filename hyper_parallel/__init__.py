"""Gradient clipping for large sharded models whose gradients live on the host."""

from .platform.torch import (
    ClipResult,
    NormBeforeOffload,
    NormReducer,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
    reduction_group,
)

__all__ = [
    "ClipResult",
    "NormBeforeOffload",
    "NormReducer",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "reduction_group",
]
