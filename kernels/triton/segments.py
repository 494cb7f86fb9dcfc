"""Tensors anywhere in device memory to the segments that kernels walk.

A table of pointers, in effect: triton-ascend cannot turn an integer into a pointer, so that entries
are distances from one of the tensors. Tensors of one dtype share a table, hence a launch.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .rows import MAX_ROWS_PER_LANE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SegmentPlan", "SegmentTable"]

_MAX_SEGMENT_NUMEL = 1 << 24  # the kernels count elements of a segment in float32
_USUAL_SEGMENT_NUMEL = 1 << 20
_SEGMENTS_PER_PROGRAM = 4
_VECTOR_BYTES = 16  # what one load instruction may fetch
_WORDS = 3  # distance, number of elements, row


@dataclass(frozen=True)
class SegmentTable:
    """Segments of all tensors of one dtype.

    Attributes:
        members: Their places in the list of tensors; distances are from the first of them.
        alignment: Elements that all distances are a multiple of.
        start: Where the table begins in the plan's words.
        num_segments: Rows of the table, of 3 words each.
    """

    members: tuple[int, ...]
    alignment: int
    start: int
    num_segments: int


class SegmentPlan:
    """How a list of tensors is cut, and which row of partial norms each segment fills.

    Rows are in the order of lanes, so that those of a lane are consecutive, and within a lane in
    the order of tensors. The tables hold addresses: a plan serves as long as `fits`.

    Args:
        tensors: On one device; float32, bfloat16 or float16, elements dense in memory.
        lane_of: The lane of each; non-negative.
        block_numel: Segments are cut at multiples of this.
        num_programs: Segments are small enough to keep so many busy.

    Attributes:
        tables: One for each dtype.
        num_rows: Rows in all.
        words: int64 on the host: the tables, as kernels read them.
        row_range_of: First row of each tensor, and the one after its last.

    Raises:
        ValueError: If a tensor is not of a dtype that there are kernels for.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        lane_of: Sequence[int],
        *,
        block_numel: int,
        num_programs: int,
    ) -> None:
        self._key = _key_of(tensors, lane_of)
        addresses, numels, dtypes, _ = self._key
        unknown = set(dtypes) - {torch.float32, torch.bfloat16, torch.float16}
        if unknown:
            raise ValueError(f"expected float32, bfloat16 or float16 tensors, got {unknown}")
        self.segment_numel = _segment_numel(sum(numels), block_numel, num_programs)
        self._lane_of = list(lane_of)
        self.row_range_of = self._lay_out_rows(numels)
        self.num_rows = max((end for _, end in self.row_range_of), default=0)
        self.words = array("q")
        self.tables: list[SegmentTable] = []
        for dtype in sorted(set(dtypes), key=str):
            members = tuple(i for i in range(len(numels)) if dtypes[i] == dtype and numels[i])
            if members:
                self.tables.append(self._tabulate(members, addresses, numels, dtype))

    def fits(self, tensors: Sequence[torch.Tensor], lane_of: Sequence[int] | None = None) -> bool:
        """Tell whether these tensors lie where the plan's did, in the same lanes if given."""
        return self._key == _key_of(tensors, self._lane_of if lane_of is None else lane_of)

    def row_range_of_lane(self, lane: int) -> tuple[int, int]:
        """Return the first row of a lane and the one after its last."""
        ranges = [r for r, its in zip(self.row_range_of, self._lane_of, strict=True) if its == lane]
        if not ranges:
            return 0, 0
        return min(begin for begin, _ in ranges), max(end for _, end in ranges)

    def _lay_out_rows(self, numels: Sequence[int]) -> list[tuple[int, int]]:
        ranges = [(0, 0)] * len(numels)
        row = 0
        for i in sorted(range(len(numels)), key=self._lane_of.__getitem__):
            end = row + -(-numels[i] // self.segment_numel)
            ranges[i] = row, end
            row = end
        return ranges

    def _tabulate(
        self,
        members: tuple[int, ...],
        addresses: Sequence[int],
        numels: Sequence[int],
        dtype: torch.dtype,
    ) -> SegmentTable:
        start = len(self.words)
        base = addresses[members[0]]
        unaligned = base % _VECTOR_BYTES
        for i in members:
            distance = addresses[i] - base
            unaligned |= distance % _VECTOR_BYTES
            first_row = self.row_range_of[i][0]
            for k, begin in enumerate(range(0, numels[i], self.segment_numel)):
                length = min(self.segment_numel, numels[i] - begin)
                self.words.extend((distance // dtype.itemsize + begin, length, first_row + k))
        alignment = 1 if unaligned else _VECTOR_BYTES // dtype.itemsize
        num_segments = (len(self.words) - start) // _WORDS
        return SegmentTable(members, alignment, start, num_segments)


def _key_of(
    tensors: Sequence[torch.Tensor], lane_of: Sequence[int]
) -> tuple[list[int], list[int], list[torch.dtype], list[int]]:
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.numel() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        list(lane_of),
    )


def _segment_numel(total_numel: int, block_numel: int, num_programs: int) -> int:
    """Return how long segments are: a multiple of a block.

    Short enough to share a small model between all programs, long enough that a large one has at
    most half as many rows as a lane may; the other half is for tensors shorter than a segment.
    """
    fair = total_numel // (num_programs * _SEGMENTS_PER_PROGRAM)
    least = -(-2 * total_numel // MAX_ROWS_PER_LANE)
    numel = max(min(fair, _USUAL_SEGMENT_NUMEL), least, 1)
    blocks = -(-numel // block_numel)
    if blocks * block_numel > _MAX_SEGMENT_NUMEL:
        raise ValueError(
            f"{total_numel} elements on one device are more than the device kernels can measure "
            f"in one call ({MAX_ROWS_PER_LANE} rows of {_MAX_SEGMENT_NUMEL})"
        )
    return blocks * block_numel
