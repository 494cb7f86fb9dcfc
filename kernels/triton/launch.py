"""Launching the kernels: which grid, which constants, on which device."""

from __future__ import annotations

import functools
import importlib.util
import math
from array import array
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .rows import ROW_NUMEL
from .segments import SegmentPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .segments import SegmentTable

__all__ = ["LaneFormat", "LaneTable", "Launcher", "is_available"]

_EXACT_SQUARES = (torch.bfloat16, torch.float16)  # in float32
_LOG2_BLOCK = 12
_LEADING_BITS = 56
# What Triton calls itself on the devices that `_shape_of` knows; the others have torch's operators.
_BACKENDS: Mapping[str, tuple[str, ...]] = {"cuda": ("cuda", "hip"), "npu": ("npu",)}
_MEASURE_ONLY = -1.0  # as max_norm; infinity is what numbers beyond float32 become


class LaneFormat(NamedTuple):
    """What the kernels must know of the wire format.

    Attributes:
        power: 2 or 1 for sums of |x|^power under SUM; 0 for maxima under MAX.
        header_numel: Floats before the first lane.
        lane_numel: Floats per lane.
        digit_bits: Bits of a digit, 10 to 23.
        nonfinite_vote: Where in the header it is voted that an element is NaN or infinite.
        huge_vote: Where it is voted that the norm may overflow.
        error_vote: Where it is voted that a rank failed.
        num_votes: All votes, from place 1 on; what else is in the header ranks must bring alike.
        group_size: Ranks that reduce.
    """

    power: int
    header_numel: int
    lane_numel: int
    digit_bits: int
    nonfinite_vote: int
    huge_vote: int
    error_vote: int
    num_votes: int
    group_size: int


class _Shape(NamedTuple):
    num_programs: int
    options: Mapping[str, Any]


@functools.cache
def is_available(device_type: str) -> bool:
    """Tell whether the kernels can run on devices of a type: Triton is there and drives them.

    Under `TRITON_INTERPRET=1` they run on any device whose memory the interpreter can reach.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if is_interpreted():
        return True
    from triton.runtime import driver

    try:
        backend = driver.active.get_current_target().backend
    except (RuntimeError, ImportError, AttributeError):  # no driver finds its device
        return False
    return backend in _BACKENDS.get(device_type, ())


@functools.cache
def is_interpreted() -> bool:
    """Tell whether Triton was imported with `TRITON_INTERPRET=1`."""
    from triton import JITFunction

    from .partial_norms import partial_norms_kernel

    return not isinstance(partial_norms_kernel, JITFunction)


class LaneTable:
    """Which rows go to which lane, and which lanes make up which norm, on a device.

    Args:
        ranges: For each lane that `encode` writes, its first row and the one after its last.
        lists: For each norm that `finish` writes, where its lanes begin in the buffer.
        device: Where to keep it; one copy goes there.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        lists: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self.num_lanes = len(ranges)
        self.num_norms = len(lists)
        words = array("q", [row for pair in ranges for row in pair])
        num_range_words = len(words)
        place = 2 * len(lists)
        for members in lists:
            words.extend((place, place + len(members)))
            place += len(members)
        for members in lists:
            words.extend(members)
        uploaded = _upload(words, device)
        self.ranges = uploaded[:num_range_words]
        self.lists = uploaded[num_range_words:]


class Launcher:
    """Runs the kernels over one list of tensors, whose tables it keeps on their device.

    All launches go to the device's current stream; none is waited for.

    Args:
        tensors: See `SegmentPlan`; not kept. None at all will do.
        lane_of: The lane of each: rows of one lane are consecutive, in the order of tensors.
        device: Where they are.

    Attributes:
        plan: Which rows are whose.
        num_uploads: Copies to the device so far.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], lane_of: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        self._shape = _shape_of(device)
        self.plan = SegmentPlan(
            tensors,
            lane_of,
            block_numel=1 << _LOG2_BLOCK,
            num_programs=self._shape.num_programs,
        )
        self._words = _upload(self.plan.words, device)
        self._lane_table: tuple[object, LaneTable] | None = None
        self.num_uploads = 1
        with torch.inference_mode(mode=False):
            self._rows = torch.empty(
                max(self.plan.num_rows, 1), ROW_NUMEL, dtype=torch.float32, device=device
            )

    def partial_norms(self, tensors: Sequence[torch.Tensor], power: int) -> torch.Tensor:
        """Return the rows, float32 [number of rows, ROW_NUMEL] on the device.

        They stay valid until the next call.

        Args:
            tensors: Those that the plan was made of, or others in their place.
            power: 2 or 1; 0 for maxima and counts only.
        """
        from .partial_norms import partial_norms_kernel

        for table in self.plan.tables:
            base = tensors[table.members[0]]
            with self._current_device():
                partial_norms_kernel[self._grid(table)](
                    base,
                    self._words[table.start :],
                    self._rows,
                    table.num_segments,
                    POWER=power,
                    HALF=base.dtype in _EXACT_SQUARES,
                    ALIGNMENT=table.alignment,
                    LOG2_BLOCK=_LOG2_BLOCK,
                    **self._shape.options,
                )
        return self._rows[: self.plan.num_rows]

    def encode(
        self,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        lanes: LaneTable,
        form: LaneFormat,
    ) -> None:
        """Add the rows to the lanes of `incoming`, into `outgoing`; both as the wire format says.

        Args:
            incoming: float32 on the device: header and lanes.
            outgoing: Alike; other memory.
            lanes: Says which rows are added to each lane.
            form: The wire format.
        """
        from .encode import encode_kernel

        num_digits = form.lane_numel - 2
        with self._current_device():
            encode_kernel[(lanes.num_lanes + 1,)](
                self._rows,
                lanes.ranges,
                incoming,
                outgoing,
                lanes.num_lanes,
                self.plan.num_rows,
                POWER=form.power,
                HEADER_NUMEL=form.header_numel,
                NONFINITE_VOTE=form.nonfinite_vote,
                HUGE_VOTE=form.huge_vote,
                NUM_DIGITS=num_digits,
                DIGIT_BITS=form.digit_bits,
                BLOCK=_power_of_two_from(max(form.lane_numel, form.header_numel)),
            )

    def finish(
        self,
        reduced: torch.Tensor,
        own_header: torch.Tensor,
        results: torch.Tensor,
        lanes: LaneTable,
        max_norm: float,
        form: LaneFormat,
    ) -> None:
        """Write [norm, coefficient, nonfinite] of each of the table's lists.

        Args:
            reduced: float32 on the device: header and lanes.
            own_header: float32 there: begins with what this rank brought in its header, its votes
                aside.
            results: float32 [number of lists, 3].
            lanes: Says which lanes make up each norm.
            max_norm: Largest norm; infinite to measure only.
            form: The wire format.
        """
        from .finish import finish_kernel

        num_digits = form.lane_numel - 2
        with self._current_device():
            finish_kernel[(lanes.num_norms,)](
                reduced,
                own_header,
                lanes.lists,
                results,
                _MEASURE_ONLY if max_norm == math.inf else _as_float32(max_norm),
                POWER=form.power,
                HEADER_NUMEL=form.header_numel,
                NUM_VOTES=form.num_votes,
                ERROR_VOTE=form.error_vote,
                NUM_ADDENDS=form.group_size if form.power else 1,
                NUM_DIGITS=num_digits,
                DIGIT_BITS=form.digit_bits,
                NUM_LEADING=2 + -(-_LEADING_BITS // form.digit_bits),
                BLOCK=_power_of_two_from(max(num_digits, form.header_numel)),
            )

    def lane_table(
        self, ranges: Sequence[tuple[int, int]], lists: Sequence[Sequence[int]]
    ) -> LaneTable:
        """Return the table of these; kept until another one is asked for."""
        key = [*ranges], [[*members] for members in lists]
        if self._lane_table is None or self._lane_table[0] != key:
            self._lane_table = key, LaneTable(ranges, lists, self._device)
            self.num_uploads += 1
        return self._lane_table[1]

    def scale_(self, tensors: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
        """Multiply in place by a float32 [1] on the device; where it is 1, touch nothing.

        Args:
            tensors: As for `partial_norms`.
            coefficient: In memory of its own.
        """
        from .scale import scale_kernel

        for table in self.plan.tables:
            with self._current_device():
                scale_kernel[self._grid(table)](
                    tensors[table.members[0]],
                    self._words[table.start :],
                    coefficient,
                    table.num_segments,
                    ALIGNMENT=table.alignment,
                    LOG2_BLOCK=_LOG2_BLOCK,
                    **self._shape.options,
                )
        tracked = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tracked)

    def _grid(self, table: SegmentTable) -> tuple[int]:
        return (min(self._shape.num_programs, table.num_segments),)

    def _current_device(self) -> AbstractContextManager[object]:
        if self._device.type == "cpu":
            return torch.inference_mode(torch.is_inference_mode_enabled())
        device: AbstractContextManager[object] = torch.get_device_module(self._device).device(
            self._device
        )
        return device


def _upload(words: array[int], device: torch.device) -> torch.Tensor:
    """Return int64 words on a device; the host does not wait.

    From fresh pinned memory each time, which torch keeps until the copy is done: the words of an
    earlier one may still be on their way.
    """
    with torch.inference_mode(mode=False):
        if not words:
            words = array("q", [0])
        on_host = torch.frombuffer(words, dtype=torch.int64)
        if device.type == "cpu":
            return on_host.clone()
        return on_host.pin_memory().to(device, non_blocking=True)


@functools.cache
def _shape_of(device: torch.device) -> _Shape:
    """Return how many programs keep a device busy, and what else to launch them with."""
    if is_interpreted():
        return _Shape(3, {})  # so that each walks several segments, and some none
    if device.type == "npu":
        from triton.runtime import driver

        properties = driver.active.utils.get_device_properties(device.index or 0)
        return _Shape(properties["num_vectorcore"], {})
    properties = torch.cuda.get_device_properties(device)
    return _Shape(4 * properties.multi_processor_count, {"num_warps": 8})


def _as_float32(value: float) -> float:
    """Return the float32 that a device takes it for; Triton's interpreter would not."""
    rounded: float = torch.tensor(value, dtype=torch.float32, device="cpu").item()
    return rounded


def _power_of_two_from(numel: int) -> int:
    return 1 << max(numel, 8).bit_length()
