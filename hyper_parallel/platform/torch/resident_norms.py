"""Gradient shards on the group's own device, whose norms meet those of host shards there.

They are launched before the host passes, added to the lanes after these came up, and known to the
host when the reduced lanes are: one copy up, one reduce, one copy down, one wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hyper_parallel.kernels import triton as kernels

from .device_norms import DeviceNorms, is_launchable, lane_format
from .lanes import ShardUnion
from .wire_format import VOTE_PLACES, PartialNorm, PartialNorms, WireFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .clip_result import Copies
    from .failure import LocalFailure
    from .grad_shards import GradShards
    from .lanes import LaneKey, Layout
    from .reduction_groups import ReductionGroup

__all__ = ["EncodedNorms", "ResidentNorms"]


class ResidentNorms:
    """Norms of those of a rank's shards that lie on the group's device.

    Args:
        shards: All of this rank's whole shards.
        indices: Which of them are meant; each `is_launchable`.
        norm_type: 2, 1 or inf.

    Attributes:
        other_indices: The others.
        others: Those.
    """

    def __init__(self, shards: GradShards, indices: Sequence[int], norm_type: float) -> None:
        chosen = shards.select(indices)
        self._indices = indices
        self._rank_sets = [reach.rank_set for reach in chosen.reaches]
        self._norms = DeviceNorms(chosen.tensors, self._rank_sets, norm_type)
        self._partials: PartialNorms | None = None
        self.other_indices = sorted(set(range(len(shards))).difference(indices))
        self.others = shards.select(self.other_indices)

    @classmethod
    def launch(
        cls, shards: GradShards, norm_type: float, group: ReductionGroup | None
    ) -> ResidentNorms | None:
        """Measure what lies on the group's device; None if nothing does that there are kernels for.

        None too where there is more than the kernels can add to a lane: they are fetched then, and
        added on the host.

        Whether it does is this rank's own affair: the others see lanes, whoever encoded them.
        """
        if shards.are_plain or group is None or group.device.type == "cpu":
            return None
        if lane_format(WireFormat(group.size, norm_type)) is None:
            return None
        indices = [
            i
            for i, tensor in enumerate(shards.tensors)
            if tensor.device == group.device
            and not isinstance(shards.reaches[i].rank_set, ShardUnion)  # not known to the lanes
            and is_launchable(tensor, norm_type)
        ]
        if not 0 < len(indices) <= kernels.MAX_TENSORS_PER_LANE:
            return None
        return cls(shards, indices, norm_type)

    @property
    def row_numel(self) -> int:
        """Floats that come down behind the lanes."""
        return self._norms.row_numel

    @property
    def copies(self) -> Copies:
        """What it has cost beside the reduce: copies up of tables that were not those before."""
        return self._norms.copies

    def for_layout(
        self, layout: Layout, wire: WireFormat, failure: LocalFailure
    ) -> EncodedNorms | None:
        """Return them as they enter the lanes of a layout; None if that fails, which is kept."""
        form = lane_format(wire)
        assert form is not None  # noqa: S101 - `launch` has asked
        with failure:
            table = self._norms.lane_table(list(layout.lane_of))
            return EncodedNorms(self._norms, table, form, failure)
        return None

    def arrive(self, rows: torch.Tensor) -> None:
        """Take the rows that came down with the lanes, float32 on the host."""
        self._partials = self._norms.to_partials(rows)

    def merge(self, partials: PartialNorms) -> PartialNorms:
        """Return the partial norms of all whole shards; identities where they have not arrived.

        Args:
            partials: Those of `others`.
        """
        resident = self._partials or PartialNorms([0.0] * len(self._indices))
        places = [*self.other_indices, *self._indices]
        rows: list[PartialNorm | None] = [None] * len(places)
        for place, partial in zip(places, [*partials, *resident], strict=True):
            rows[place] = partial
        return PartialNorms.of(row for row in rows if row is not None)

    def combine_with(
        self, partials: Mapping[LaneKey, PartialNorm], wire: WireFormat
    ) -> dict[LaneKey, PartialNorm]:
        """Return partial norms by rank set, with those that have arrived."""
        combined = dict(partials)
        for rank_set, partial in zip(self._rank_sets, self._partials or (), strict=True):
            if rank_set in combined:  # unless another rank counts it
                combined[rank_set] = wire.combine([combined[rank_set], partial])
        return combined


class EncodedNorms:
    """Norms on the device on their way into the lanes of one layout.

    Args:
        norms: Launched.
        table: Sends their rows to lanes.
        form: The wire format.
        failure: Of this rank.
    """

    def __init__(
        self,
        norms: DeviceNorms,
        table: kernels.LaneTable,
        form: kernels.LaneFormat,
        failure: LocalFailure,
    ) -> None:
        self._norms = norms
        self._table = table
        self._form = form
        self._failure = failure

    @property
    def row_numel(self) -> int:
        """Floats of all rows."""
        return self._norms.row_numel

    def encode(self, arrived: torch.Tensor, lanes: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the norms to header and lanes in `arrived`, into `lanes`; copy their rows.

        The others wait for this rank's buffer: if it fails, the header says so.
        """
        with self._failure:
            self._norms.launcher.encode(arrived, lanes, self._table, self._form)
            rows.copy_(self._norms.rows.view(-1))
            return
        rows.zero_()
        lanes.copy_(arrived)
        lanes[VOTE_PLACES["error"]].fill_(1.0)
