"""Norms and scaling of tensors in device memory, in Triton: triton-ascend and mainline alike.

Nothing is imported from Triton before something here is called, since that takes half a second and
not everybody has it. The contract of each kernel is in its module, and what it must compute, in
exact arithmetic, in `kernels/reference.py`.
"""

from .launch import LaneFormat, LaneTable, Launcher, is_available
from .rows import (
    MAX_ROWS_PER_LANE,
    MAX_TENSORS_PER_LANE,
    ROW_NUMEL,
    RangeTotals,
    totals_of_ranges,
)
from .segments import SegmentPlan

__all__ = [
    "MAX_ROWS_PER_LANE",
    "MAX_TENSORS_PER_LANE",
    "ROW_NUMEL",
    "LaneFormat",
    "LaneTable",
    "Launcher",
    "RangeTotals",
    "SegmentPlan",
    "is_available",
    "totals_of_ranges",
]
