"""The clip of a model that lies on its devices, without a copy up or down and without waiting.

Measure, encode, reduce, finish and scale are queued on the device's stream, and the host goes on.
That takes a layout on which nothing is asked any more: no votes are read. What a rank meets that
was not agreed on cannot be told to the others; it poisons their norm with NaN and raises.
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
    from collections.abc import Callable

    from .declarations import Declarations
    from .lanes import LaneKey
    from .parameter_list import ParameterList
    from .reduction_groups import ReductionGroup

__all__ = ["NORM_TYPES", "FrozenReduction"]

NORM_TYPES = (2.0, 1.0, math.inf)
_MOST_LANES_READ = 64  # by kernels.triton.finish


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
        self._templates: dict[float, torch.Tensor] = {}
        self._known_lists: dict[float, tuple[list[list[int]], list[tuple[int, ...]]]] = {}
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
            and len(foretold) <= kernels.MAX_ROWS_PER_LANE // 2
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
            Norms and coefficient on the device; `nonfinite` is empty and `replica_spread` 0.

        Ranks: all of the group.
        Sync: none, but before it raises. A copy up, not waited for, where gradients lie elsewhere
        than the last time.

        Raises:
            Exception: On this rank alone, what was unexpected about its gradients. The norm of the
                others is NaN.
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
        if failure.error is None:
            with failure:
                if shards:
                    keys = [reach.rank_set for reach in shards.reaches]
                    norms = DeviceNorms(shards.tensors, keys, wire.norm_type)
                buffer, table, copies = self._encode(norms, wire)
        stopwatch.lap("measure")

        module = torch.get_device_module(group.device)
        with collectives_of(group), module.device(group.device):
            if failure.error is not None:
                buffer = self._packed(wire, value=1.0)
            op = dist.ReduceOp.SUM if wire.op == "sum" else dist.ReduceOp.MAX
            num_reduced = wire.header_numel + len(self._layout.lane_of) * wire.lane_numel
            dist.all_reduce(buffer[:num_reduced], op=op, group=group.group)
            if failure.error is not None:
                module.synchronize()  # the others get their NaN, whatever becomes of this rank
        stopwatch.lap("reduce")
        if failure.error is not None:
            raise failure.error

        results = torch.empty(table.num_norms, 3, dtype=torch.float32, device=group.device)
        form = lane_format(wire)
        assert form is not None  # noqa: S101 - `agreed` and `takes` have asked
        launcher = norms.launcher if norms else self._idle
        launcher.finish(buffer, results, table, request.max_norm, form)
        stopwatch.lap("finish")
        if norms and request.changes_gradients:
            launcher.scale_(shards.tensors, results[0, 1:2])
        stopwatch.lap("scale")

        total, local, *by_rank_set = results[:, 0].unbind()
        return ClipResult(
            total_norm=total,
            clip_coef=results[0, 1],
            local_norm=local,
            norms_by_rank_set=dict(zip(self._lists(wire)[1], by_rank_set, strict=True)),
            copies=copies + Copies(collectives=1),
            timings=stopwatch.laps,
        )

    def _validate(self, shards: GradShards, parameters: ParameterList) -> None:
        known = {*self._layout.lane_of, UNSHARDED}
        strangers = [
            parameters.describe(shards.positions[i])
            for i, (tensor, reach) in enumerate(zip(shards.tensors, shards.reaches, strict=True))
            if reach.pending
            or reach.rank_set not in known
            or tensor.device != self._group.device
            or not is_launchable(tensor)
        ]
        if strangers or len(shards) > kernels.MAX_ROWS_PER_LANE // 2:
            raise RuntimeError(
                f"rank {self._group.rank}: the gradients of {join_some(strangers)} are not what "
                "NormReducer(model) agreed on with the other ranks: dense float32, bfloat16 or "
                f"float16 on {self._group.device}, sharded as the parameters are; the other ranks' "
                "norm is NaN now. Make a new NormReducer(model) on all ranks, or one without a "
                "model, which asks the others in every clip"
            )

    def _encode(
        self, norms: DeviceNorms | None, wire: WireFormat
    ) -> tuple[torch.Tensor, kernels.LaneTable, Copies]:
        """Return the buffer to reduce, the table to finish it by, and what they cost."""
        num_templates = len(self._templates)
        template = self._template(wire)
        copies = Copies(h2d=len(self._templates) - num_templates)
        lists, _ = self._lists(wire)
        if norms is None:
            table = kernels.LaneTable([], lists, self._group.device)
            return template.clone(), table, copies + Copies(h2d=1)
        keys: list[LaneKey] = [*self._layout.lane_of, UNSHARDED]
        table = norms.lane_table(keys, lists, with_all=True)
        form = lane_format(wire)
        assert form is not None  # noqa: S101
        buffer = torch.empty_like(template)
        norms.launcher.encode(template, buffer, table, form)
        return buffer, table, copies + norms.copies

    def _template(self, wire: WireFormat) -> torch.Tensor:
        """Return a buffer to which no rank has contributed, on the device."""
        if wire.norm_type not in self._templates:
            self._templates[wire.norm_type] = self._packed(wire, value=0.0)
        return self._templates[wire.norm_type]

    def _packed(self, wire: WireFormat, *, value: float) -> torch.Tensor:
        """Return a buffer on the device with this NaN count in every lane."""
        lanes = [None] * (len(self._layout.lane_of) + 2)
        packed: array[float] = wire.pack(Votes(), 0, lanes, 0)
        on_host = torch.frombuffer(packed, dtype=torch.float32)
        on_host[wire.header_numel :: wire.lane_numel] = value
        return on_host.pin_memory().to(self._group.device, non_blocking=True)

    def _lists(self, wire: WireFormat) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """Return where the lanes of each norm begin: total, own, each rank set's; and those."""
        if wire.norm_type not in self._known_lists:
            self._known_lists[wire.norm_type] = self._lay_out_lists(wire)
        return self._known_lists[wire.norm_type]

    def _lay_out_lists(self, wire: WireFormat) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        num_reduced = len(self._layout.lane_of)
        starts = [wire.header_numel + lane * wire.lane_numel for lane in range(num_reduced + 2)]
        rank_sets = list(self._layout.own_rank_sets)
        own = [starts[self._layout.lane_of[rank_set]] for rank_set in rank_sets]
        unsharded, everything = starts[num_reduced:]
        lists = [[*own, unsharded], [everything], *([start] for start in own), [unsharded]]
        return lists, [*rank_sets, UNSHARDED]


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
