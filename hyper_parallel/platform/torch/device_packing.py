"""One rank's buffer, packed on the device: the parts that the host does not know.

Sums that were taken on the device stay there. What the host knows, its own partial norms and the
header, goes along as arguments of kernels, so that nothing is copied up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .device_lanes import encode, to_lanes
from .lanes import UNCOUNTED, UNSHARDED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .early_norms import EarlySums
    from .lanes import LaneKey, Layout
    from .wire_format import PartialNorm, WireFormat

__all__ = ["DeviceLanes", "pack_on_device"]

# Half of it: the host votes for its own half (local_gradients).
_HUGE_SUM = torch.finfo(torch.float32).max ** 2 / 2


class DeviceLanes(NamedTuple):
    """What is behind the header, and beside it.

    Attributes:
        lanes: [num_lanes, lane_numel] float32, device: of the layout.
        own: [2, lane_numel] float32, device: not to be reduced. All early sums of this rank, and
            those of gradients that it holds whole.
        votes: 0-dim float32, device, 1 for yes: by their names in `Votes`.
    """

    lanes: torch.Tensor
    own: torch.Tensor
    votes: Mapping[str, torch.Tensor]


def pack_on_device(
    early: EarlySums,
    partials: Mapping[LaneKey, PartialNorm],
    layout: Layout,
    wire: WireFormat,
    device: torch.device,
) -> DeviceLanes:
    """Add early sums and the host's partial norms up, one lane per rank set, exactly.

    Args:
        early: On `device`; may be empty.
        partials: What the host has measured, of rank sets of the layout.
        layout: Which has a lane for all of them.
        wire: Of p = 2.
        device: The group's.

    Sync: none.
    """
    placed: dict[LaneKey, list[torch.Tensor]] = {}
    for key, parts in early.sums.items():
        # Without a lane of its own: of gradients that are whole, or counted elsewhere.
        placed.setdefault(layout.rank_set_of(key) or key, []).extend(parts)
    known = {s: partial for s, partial in partials.items() if partial.value or partial.is_nonfinite}
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    parts = [part for parts in placed.values() for part in parts]
    fills = [torch.full_like(zero, _as_float(partial)) for partial in known.values()]
    values = torch.cat([*parts, zero, *fills])
    rows = encode(values, wire)
    num_early = values.numel() - len(fills) - 1
    start = 0
    added: dict[LaneKey, torch.Tensor] = {}
    for rank_set, parts in placed.items():
        end = start + sum(part.numel() for part in parts)
        added[rank_set] = rows[start:end].sum(0)
        start = end
    own = [rows[:num_early].sum(0), added.pop(UNSHARDED, torch.zeros_like(rows[0]))]
    added.pop(UNCOUNTED, None)
    for rank_set, row in zip(known, rows[num_early + 1 :], strict=True):
        added[rank_set] = added[rank_set] + row if rank_set in added else row
    packed = to_lanes(torch.stack([*own, *added.values()]), values.numel(), wire)
    lane_of: dict[LaneKey, int] = dict(layout.lane_of.items())
    lanes = packed.new_zeros(len(lane_of), wire.lane_numel)
    for place, row in zip(map(lane_of.__getitem__, added), packed[2:], strict=True):
        lanes[place].copy_(row)
    early_sum = values[:num_early].sum()
    votes = {
        "nonfinite": rows[:, :2].any().to(torch.float32),
        "huge": (early_sum * wire.group_size >= _HUGE_SUM).to(torch.float32),
    }
    return DeviceLanes(lanes, packed[:2], votes)


def _as_float(partial: PartialNorm) -> float:
    if partial.num_nan:
        return math.nan
    return math.inf if partial.is_nonfinite else partial.value
