"""The clip of a model that lies on its devices, without a copy up or down and without waiting.

Measure, encode, reduce, finish and scale are queued on the device's stream, and the host goes on.
That takes a layout on which nothing is asked any more. Of the header only the device reads: whether
all ranks asked for the same clip, and whether one failed. Then nobody can be told; the norm becomes
NaN, gradients are left alone, and the rank that failed raises.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hyper_parallel.kernels import triton as kernels

from .clip_request import NOTHING_ASKED, ClipRequest
from .clip_result import ClipResult, Copies, Stopwatch
from .declarations import NOTHING_DECLARED
from .deferred_scaling import Scaling
from .device_norms import DeviceNorms, is_launchable, lane_format
from .failure import LocalFailure, collectives_of, join_some
from .grad_shards import GradShards, collect_grad_shards
from .lanes import UNSHARDED
from .wire_format import Votes, WireFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .declarations import Declarations
    from .lanes import LaneKey, Layout, RankSet
    from .parameter_list import ParameterList
    from .reduction_groups import ReductionGroup

__all__ = ["NORM_TYPES", "FrozenReduction"]

NORM_TYPES = (2.0, 1.0, math.inf)
_MOST_LANES_READ = 64  # by kernels.triton.finish
_IN_ORDER, _FAILED = Votes(frozen=True), Votes(frozen=True, error=True)


class FrozenReduction:
    """Clips over one group with the layout it has now.

    The buffer has two lanes more than are reduced: one for what this rank holds whole, which is
    added after the reduce, and one for all of its shards, for `local_norm`.

    Args:
        group: The group; its layout is agreed.
    """

    def __init__(self, group: ReductionGroup) -> None:
        if group.layout is None:
            raise RuntimeError("the layout must have been agreed on before it is frozen")
        self._group = group
        self._layout = group.layout
        self._own_rank_sets = group.layout.own_rank_sets
        self._known = frozenset((*group.layout.lane_of, UNSHARDED))
        self._frames: dict[float, _Frame] = {}
        self._idle = kernels.Launcher([], [], group.device)  # of a clip without gradients

    @classmethod
    def agreed(
        cls, group: ReductionGroup, foretold: GradShards, declared: Declarations
    ) -> FrozenReduction | None:
        """Freeze the layout if every rank's part of the model lies on the group's device.

        Args:
            group: The group; its layout is agreed.
            foretold: This rank's parameters, with the reaches of their gradients.
            declared: What the user said of them.

        Ranks: all of the group. One small all-reduce, if the group has a device.
        """
        if group.device.type == "cpu" or lane_format(WireFormat(group.size, 2.0)) is None:
            return None
        is_resident = (
            declared == NOTHING_DECLARED
            and group.layout is not None
            and len(group.layout.own_rank_sets) < _MOST_LANES_READ
            and len(foretold) <= kernels.MAX_TENSORS_PER_LANE
            and not foretold.pending
            and all(
                tensor.numel() == 0 or (tensor.device == group.device and is_launchable(tensor))
                for tensor in map(_local_of, foretold.tensors)
            )
        )
        (num_others,) = group.sum_ints([int(not is_resident)])
        return cls(group) if num_others == 0 else None

    @torch.no_grad()
    def clip_(
        self,
        list_parameters: Callable[[], ParameterList],
        norm_type: float,
        asked: Callable[[], ClipRequest],
    ) -> ClipResult:
        """Queue a clip.

        Args:
            list_parameters: What to clip.
            norm_type: Of `NORM_TYPES`.
            asked: The request, checked; nothing that has to be known on the host.

        Returns:
            Norms and coefficient on the device; `nonfinite` is empty and `replica_spread` 0. Where
            ranks asked for different clips, or one failed, all norms are NaN and the coefficient is
            1: gradients are as they were.

        Ranks: all of the group.
        Sync: none, but before it raises. Copies up, not waited for: two of tables where gradients
        lie elsewhere than the last time, one the first time of a norm type and when the group's
        layout has grown.

        Raises:
            Exception: On this rank alone, what was unexpected about its gradients. The norm of the
                others is NaN, and no gradient changed.
        """
        with Stopwatch() as stopwatch:
            return self._take_steps(list_parameters, norm_type, asked, stopwatch)

    def _take_steps(
        self,
        list_parameters: Callable[[], ParameterList],
        norm_type: float,
        asked: Callable[[], ClipRequest],
        stopwatch: Stopwatch,
    ) -> ClipResult:
        request, shards = NOTHING_ASKED, GradShards([], [], [])
        with LocalFailure() as failure:
            request, parameters = asked(), list_parameters()
            shards = collect_grad_shards(parameters, writable=request.changes_gradients)
            if not all(map(torch.Tensor.numel, shards.tensors)):
                # torch puts what a rank outside a mesh has of a DTensor, nothing, on the CPU.
                shards = shards.select(i for i, t in enumerate(shards.tensors) if t.numel())
            self._validate(shards, parameters)
            Scaling(foreach=True).validate(parameters, shards, request)
        stopwatch.lap("collect")
        return self._queue(
            shards, request, WireFormat(self._group.size, norm_type), failure, stopwatch
        )

    # Or buffers made there could not be viewed: as in staging_buffer.py.
    @torch.inference_mode(mode=False)
    def _queue(
        self,
        shards: GradShards,
        request: ClipRequest,
        wire: WireFormat,
        failure: LocalFailure,
        stopwatch: Stopwatch,
    ) -> ClipResult:
        """Queue everything on the device's stream."""
        group, norms = self._group, None
        self._follow_layout()
        num_reduced = len(self._layout.lane_of)
        if failure.error is None:
            with failure:
                if shards:
                    keys = [reach.rank_set for reach in shards.reaches]
                    norms = DeviceNorms(shards.tensors, keys, wire.norm_type)
                frame, copies = self._frame_of(wire, request.frozen_stamp)
                buffer, table, others = self._encode(norms, frame)
        stopwatch.lap("measure")

        module = torch.get_device_module(group.device)
        with collectives_of(group), module.device(group.device):
            if failure.error is not None:
                buffer = _packed(wire, _FAILED, request.frozen_stamp, num_reduced, group.device)
            op = dist.ReduceOp.SUM if wire.op == "sum" else dist.ReduceOp.MAX
            numel = wire.header_numel + num_reduced * wire.lane_numel
            dist.all_reduce(buffer[:numel], op=op, group=group.group)
            if failure.error is not None:
                module.synchronize()  # the others get their NaN, whatever becomes of this rank
        stopwatch.lap("reduce")
        if failure.error is not None:
            raise failure.error

        results = torch.empty(table.num_norms, 3, dtype=torch.float32, device=group.device)
        launcher = norms.launcher if norms else self._idle
        launcher.finish(buffer, frame.template, results, table, request.max_norm, frame.form)
        stopwatch.lap("finish")
        if norms and request.changes_gradients:
            launcher.scale_(shards.tensors, results[0, 1:2])
        stopwatch.lap("scale")

        total, local, *by_rank_set = results[:, 0].unbind()
        return ClipResult(
            total_norm=total,
            clip_coef=results[0, 1],
            local_norm=local,
            norms_by_rank_set=dict(zip(frame.rank_sets, by_rank_set, strict=True)),
            copies=copies + others + Copies(collectives=1),
            timings=stopwatch.laps,
        )

    def _validate(self, shards: GradShards, parameters: ParameterList) -> None:
        strangers = [
            parameters.describe(shards.positions[i])
            for i, (tensor, reach) in enumerate(zip(shards.tensors, shards.reaches, strict=True))
            if reach.pending
            or reach.rank_set not in self._known
            or tensor.device != self._group.device
            or not is_launchable(tensor)
        ]
        if strangers or len(shards) > kernels.MAX_TENSORS_PER_LANE:
            raise RuntimeError(
                f"rank {self._group.rank}: the gradients of {join_some(strangers)} are not what "
                "NormReducer(model) agreed on with the other ranks: dense float32, bfloat16 or "
                f"float16 on {self._group.device}, sharded as the parameters are; the other ranks' "
                "norm is NaN now, and no gradient was changed. Make a new NormReducer(model) on "
                "all ranks, or one without a model, which asks the others in every clip"
            )

    def _encode(
        self, norms: DeviceNorms | None, frame: _Frame
    ) -> tuple[torch.Tensor, kernels.LaneTable, Copies]:
        """Return the buffer to reduce, the table to finish it by, and what they cost."""
        if norms is None:
            table = kernels.LaneTable([], frame.lists, self._group.device)
            return frame.template.clone(), table, Copies(h2d=1)
        table = norms.lane_table(frame.keys, frame.lists, with_all=True)
        buffer = torch.empty_like(frame.template)
        norms.launcher.encode(frame.template, buffer, table, frame.form)
        return buffer, table, norms.copies

    def _frame_of(self, wire: WireFormat, stamp: int) -> tuple[_Frame, Copies]:
        """Return the frame of a norm type, with this stamp in its header, and what it cost.

        It follows the layout of the group, which other clips may have let grow, so that a rank
        whose clip is not frozen reduces a buffer of the same size.
        """
        frame = self._frames.get(wire.norm_type)
        if frame is not None and frame.layout is self._layout:
            frame.sign(wire, stamp)
            return frame, Copies()
        self._frames[wire.norm_type] = frame = _Frame(
            wire, stamp, self._layout, self._own_rank_sets, self._group.device
        )
        return frame, Copies(h2d=1)

    def _follow_layout(self) -> None:
        """Take the group's layout if it has grown; alike on all ranks, as that was."""
        layout = self._group.layout
        if (
            layout is not None
            and layout is not self._layout
            and layout.lane_of.keys() >= self._layout.lane_of.keys()
        ):
            self._layout = layout


class _Frame:
    """What the clips of a norm type over a layout have in common.

    Args:
        wire: The format.
        stamp: What all ranks must have asked for alike.
        layout: The lanes.
        own_rank_sets: Of those, the rank sets that make up the norm of this rank.
        device: Where the template goes, by a copy that is not waited for.

    Attributes:
        layout: As passed.
        form: The format as the kernels know it.
        template: A buffer to which this rank has contributed nothing but its header, on the device.
        keys: Of the lanes behind the header: the reduced ones, then that of what is held whole.
        lists: Where the lanes of each norm begin: total, all own shards, each rank set's.
        rank_sets: Those of the latter.
    """

    def __init__(
        self,
        wire: WireFormat,
        stamp: int,
        layout: Layout,
        own_rank_sets: Sequence[RankSet],
        device: torch.device,
    ) -> None:
        form = lane_format(wire)
        assert form is not None  # noqa: S101 - `agreed` has asked
        self.layout = layout
        self.form = form
        self.keys: list[LaneKey] = [*layout.lane_of, UNSHARDED]
        num_reduced = len(layout.lane_of)
        starts = [wire.header_numel + lane * wire.lane_numel for lane in range(num_reduced + 2)]
        own = [starts[layout.lane_of[rank_set]] for rank_set in own_rank_sets]
        unsharded, everything = starts[num_reduced:]
        self.lists = [[*own, unsharded], [everything], *([start] for start in own), [unsharded]]
        self.rank_sets = [*own_rank_sets, UNSHARDED]
        self.template = _packed(wire, _IN_ORDER, stamp, num_reduced + 2, device)
        self._stamp = stamp
        self._header: list[float | None] = [*wire.pack_header(_IN_ORDER, stamp)]

    def sign(self, wire: WireFormat, stamp: int) -> None:
        """Change what is new in the header; numbers are arguments of the kernels."""
        if stamp == self._stamp:
            return
        for i, value in enumerate(wire.pack_header(_IN_ORDER, stamp)):
            if self._header[i] != value:
                self._header[i] = None  # unknown, if this fails
                self.template[i].fill_(value)
                self._header[i] = value
        self._stamp = stamp


def _packed(
    wire: WireFormat, votes: Votes, stamp: int, num_lanes: int, device: torch.device
) -> torch.Tensor:
    """Return a buffer of idle lanes on the device."""
    packed: array[float] = wire.pack(votes, stamp, [None] * num_lanes)
    return torch.frombuffer(packed, dtype=torch.float32).pin_memory().to(device, non_blocking=True)


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
