"""The public names for torch; everything else in this package may change."""

from .clip_grad import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from .clip_result import ClipResult
from .norm_before_offload import NormBeforeOffload
from .reducer import NormReducer
from .reduction_groups import reduction_group

__all__ = [
    "ClipResult",
    "NormBeforeOffload",
    "NormReducer",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "reduction_group",
]
