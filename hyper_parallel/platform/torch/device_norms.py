"""Partial norms of device shards that stay on their device until the lanes come back from it.

One launch per dtype measures them, another adds them to the lanes that came up from the host, so
that the host waits once, for lanes and rows together. With `partial_norms.py`, which turns to this
module for shards on devices, the only ones that know kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hyper_parallel.kernels import triton as kernels

from .clip_result import Copies
from .wire_format import VOTE_PLACES, PartialNorm, PartialNorms

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from .wire_format import WireFormat

__all__ = [
    "DeviceNorms",
    "has_private_format",
    "is_launchable",
    "lane_format",
    "launch_norms",
    "scale_on_device_",
]

_POWERS = {2.0: 2, 1.0: 1, math.inf: 0}
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_DIGIT_BITS = range(10, 24)
# Models that are clipped in turn keep their tables on the device.
_MOST_LAUNCHERS = 8

_launchers: list[tuple[torch.device, kernels.Launcher]] = []


def is_launchable(tensor: torch.Tensor, norm_type: float = 2.0) -> bool:
    """Tell whether the kernels can measure a tensor, or scale it: on a device, dense, no float64.

    Of an NPU's tensors not those in an order of its own, such as NZ: `_foreach` operators refuse
    these, and single operators take them.
    """
    return (
        not tensor.is_cpu
        and norm_type in _POWERS
        and tensor.dtype in _DTYPES
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and kernels.is_available(tensor.device.type)
        and not has_private_format(tensor)
    )


def lane_format(wire: WireFormat) -> kernels.LaneFormat | None:
    """Return what the kernels must know of a wire format; None if they cannot write it."""
    if wire.norm_type not in _POWERS or wire.digit_bits not in _DIGIT_BITS:
        return None
    return kernels.LaneFormat(
        power=_POWERS[wire.norm_type],
        header_numel=wire.header_numel,
        lane_numel=wire.lane_numel,
        digit_bits=wire.digit_bits,
        nonfinite_vote=VOTE_PLACES["nonfinite"],
        huge_vote=VOTE_PLACES["huge"],
        error_vote=VOTE_PLACES["error"],
        num_votes=len(VOTE_PLACES),
        group_size=wire.group_size,
    )


class DeviceNorms:
    """Partial norms of tensors on one device, launched and not waited for.

    Args:
        tensors: On one device, each `is_launchable`.
        lane_keys: For each, what it shares with those whose norms belong together. None if they
            are to be fetched only.
        norm_type: 2, 1 or inf.

    Attributes:
        launcher: Has them measured.
        rows: float32 [number of rows, ROW_NUMEL], on the device.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        lane_keys: Sequence[Hashable] | None,
        norm_type: float,
    ) -> None:
        self._norm_type = norm_type
        lane_keys = lane_keys or [None] * len(tensors)
        self._place_of = {key: i for i, key in enumerate(dict.fromkeys(lane_keys))}
        lane_of = [self._place_of[key] for key in lane_keys]
        self.launcher, self._num_uploads = _launcher_for(tensors, lane_of, tensors[0].device)
        self.rows = self.launcher.partial_norms(tensors, _POWERS[norm_type])

    @property
    def copies(self) -> Copies:
        """What it has cost: copies up, where the tensors or the lanes were not those before."""
        return Copies(h2d=self.launcher.num_uploads - self._num_uploads)

    @property
    def row_numel(self) -> int:
        """Floats of all rows."""
        num_rows: int = self.launcher.plan.num_rows
        return num_rows * int(kernels.ROW_NUMEL)

    def lane_table(
        self,
        lane_keys: Sequence[Hashable],
        lists: Sequence[Sequence[int]] = (),
        *,
        with_all: bool = False,
    ) -> kernels.LaneTable:
        """Return the table that sends rows to lanes; kept for the next time.

        Args:
            lane_keys: In the order of lanes; what no tensor has gets none of the rows.
            lists: See `LaneTable`.
            with_all: One lane more follows, with all rows.
        """
        ranges = [self._row_range_of(self._place_of.get(key)) for key in lane_keys]
        if with_all:
            ranges.append((0, self.launcher.plan.num_rows))
        return self.launcher.lane_table(ranges, lists)

    def to_partials(self, rows: torch.Tensor) -> PartialNorms:
        """Return the partial norm of each tensor.

        Args:
            rows: A copy of `rows` on the host.
        """
        totals = kernels.totals_of_ranges(
            rows.view(-1, kernels.ROW_NUMEL),
            self.launcher.plan.row_range_of,
            _POWERS[self._norm_type],
        )
        others = {
            i: PartialNorm(0.0, num_nan, num_inf)
            for i, (num_nan, num_inf) in totals.nonfinite.items()
        }
        return PartialNorms(totals.values, others)

    def fetch(self) -> tuple[PartialNorms, Copies]:
        """Return the partial norms now, and what all of it cost. Sync: one."""
        partials = self.to_partials(self.rows.cpu())
        moves = 1 if self.row_numel else 0  # tensors may all be empty
        return partials, self.copies + Copies(d2h=moves, host_syncs=moves)

    def _row_range_of(self, place: int | None) -> tuple[int, int]:
        return (0, 0) if place is None else self.launcher.plan.row_range_of_lane(place)


def launch_norms(
    tensors: Sequence[torch.Tensor], norm_type: float
) -> list[tuple[list[int], DeviceNorms]]:
    """Launch the kernels over those of the tensors that they take.

    Returns:
        For each device which tensors these are, and their norms.
    """
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_launchable(tensor, norm_type):
            by_device.setdefault(tensor.device, []).append(i)
    groups = by_device.values()
    return [(group, DeviceNorms([tensors[i] for i in group], None, norm_type)) for group in groups]


def scale_on_device_(tensors: Sequence[torch.Tensor], coef: float) -> Copies:
    """Multiply in place, all tensors of a dtype in one launch; each `is_launchable`.

    Returns:
        What it cost: copies up, where the tensors were not those before.
    """
    device = tensors[0].device
    launcher, num_uploads = _launcher_for(tensors, None, device)
    launcher.scale_(tensors, torch.full((1,), coef, dtype=torch.float32, device=device))
    return Copies(h2d=launcher.num_uploads - num_uploads)


def _launcher_for(
    tensors: Sequence[torch.Tensor], lane_of: Sequence[int] | None, device: torch.device
) -> tuple[kernels.Launcher, int]:
    """Return the launcher these tensors had the last time, or a new one, and its copies before."""
    for i, (known_device, launcher) in enumerate(_launchers):
        if known_device == device and launcher.plan.fits(tensors, lane_of):
            _launchers.insert(0, _launchers.pop(i))
            return launcher, launcher.num_uploads
    launcher = kernels.Launcher(tensors, lane_of or [0] * len(tensors), device)
    _launchers.insert(0, (device, launcher))
    del _launchers[_MOST_LAUNCHERS:]
    return launcher, 0


def has_private_format(tensor: torch.Tensor) -> bool:
    """Tell whether an NPU keeps a tensor in an order of its own, such as NZ.

    torch_npu's `_foreach` operators refuse these too; single operators take them.
    """
    if tensor.device.type != "npu":
        return False
    get_format = getattr(torch.get_device_module("npu"), "get_npu_format", None)
    return get_format is not None and get_format(tensor) not in (-1, 0, 2)  # undefined, NCHW, ND
