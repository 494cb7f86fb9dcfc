"""Launching the kernels: which grid, which constants, on which device."""

from __future__ import annotations

import functools
import importlib.util
from array import array
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .rows import ROW_NUMEL
from .segments import SegmentPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .segments import SegmentTable

__all__ = ["Launcher", "LaneFormat", "is_available"]

_EXACT_SQUARES = (torch.bfloat16, torch.float16)  # in float32
_LOG2_BLOCK = 12
_LEADING_BITS = 56


class LaneFormat(NamedTuple):
    """What the kernels must know of the wire format.

    Attributes:
        power: 2 or 1 for sums of |x|^power under SUM; 0 for maxima under MAX.
        header_numel: Floats before the first lane.
        lane_numel: Floats per lane.
        digit_bits: Bits of a digit, 10 to 23.
        nonfinite_vote: Where in the header it is voted that an element is NaN or infinite.
        huge_vote: Where it is voted that the norm may overflow.
    """

    power: int
    header_numel: int
    lane_numel: int
    digit_bits: int
    nonfinite_vote: int
    huge_vote: int


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
    return device_type != "cpu" and backend in (device_type, "hip" if torch.version.hip else "")


@functools.cache
def is_interpreted() -> bool:
    """Tell whether Triton was imported with `TRITON_INTERPRET=1`."""
    from triton import JITFunction

    from .partial_norms import partial_norms_kernel

    return not isinstance(partial_norms_kernel, JITFunction)


class Launcher:
    """Runs the kernels over one list of tensors, whose tables it keeps on their device.

    All launches go to the device's current stream; none is waited for.

    Args:
        tensors: See `SegmentPlan`; not kept.
        lane_of: The lane of each.
        lane_ranges: For each lane that `encode` writes, the lanes of tensors whose rows it adds
            up; None for all rows.
        own_lanes: Where in the buffer the lanes begin that `finish` adds up.

    Attributes:
        plan: Which rows are whose.
        num_uploads: Copies to the device that it has cost.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        lane_of: Sequence[int],
        lane_ranges: Sequence[int | None] = (),
        own_lanes: Sequence[int] = (),
    ) -> None:
        self._device = tensors[0].device
        self._shape = _shape_of(self._device)
        self.plan = SegmentPlan(
            tensors,
            lane_of,
            block_numel=1 << _LOG2_BLOCK,
            num_programs=self._shape.num_programs,
        )
        words = array("q", self.plan.words)
        self._ranges_start = len(words)
        for lane in lane_ranges:
            everything = (0, self.plan.num_rows)
            words.extend(everything if lane is None else self.plan.row_range_of_lane(lane))
        self._own_start = len(words)
        words.extend(own_lanes)
        self._num_lanes = len(lane_ranges)
        self._num_own = len(own_lanes)
        self._words = _upload(words, self._device)
        with torch.inference_mode(mode=False):
            self._rows = torch.empty(
                max(self.plan.num_rows, 1), ROW_NUMEL, dtype=torch.float32, device=self._device
            )
        self.num_uploads = 1

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

    def encode(self, incoming: torch.Tensor, outgoing: torch.Tensor, form: LaneFormat) -> None:
        """Add the rows to the lanes of `incoming`, into `outgoing`; both as the wire format says.

        Args:
            incoming: float32 on the device: header and one lane for each of `lane_ranges`.
            outgoing: Alike; other memory.
            form: The wire format.
        """
        from .encode import encode_kernel

        num_digits = form.lane_numel - 2
        with self._current_device():
            encode_kernel[(self._num_lanes + 1,)](
                self._rows,
                self._words[self._ranges_start :],
                incoming,
                outgoing,
                self._num_lanes,
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
        self, reduced: torch.Tensor, result: torch.Tensor, max_norm: float, form: LaneFormat
    ) -> None:
        """Write [norm, coefficient, nonfinite] of `own_lanes` to `result`, float32 [3]."""
        from .finish import finish_kernel

        num_digits = form.lane_numel - 2
        with self._current_device():
            finish_kernel[(1,)](
                reduced,
                self._words[self._own_start :],
                result,
                self._num_own,
                max_norm,
                POWER=form.power,
                NUM_DIGITS=num_digits,
                DIGIT_BITS=form.digit_bits,
                NUM_LEADING=2 + -(-_LEADING_BITS // form.digit_bits),
                BLOCK=_power_of_two_from(num_digits),
            )

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


def _power_of_two_from(numel: int) -> int:
    return 1 << max(numel, 8).bit_length()
