"""The buffer that is reduced: on the host, where a clip packs and reads it, and on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .clip_result import Copies
from .wire_format import VOTE_PLACES

if TYPE_CHECKING:
    from array import array

    from .device_packing import DeviceLanes
    from .resident_norms import EncodedNorms

__all__ = ["StagingBuffer"]


class StagingBuffer:
    """The host buffer that holds header and lanes, pinned, and its twin on the device.

    Where the group reduces CPU tensors the two are one, and nothing is copied. The host buffer is
    free to be rewritten whenever a reduce has returned: the copy down is behind the copy up on the
    same stream, and has been waited for.

    Args:
        numel: Floats in the buffer that are reduced.
        device: The group's.
        own_numel: Floats behind them that are not, but come down with them.

    Attributes:
        numel: As passed.
        own_numel: As passed.
    """

    def __init__(self, numel: int, device: torch.device, own_numel: int = 0) -> None:
        self.numel = numel
        self.own_numel = own_numel
        self._on_host = device.type == "cpu"
        pin = not self._on_host
        # Not an inference tensor, which only inference mode could write again.
        with torch.inference_mode(mode=False):
            whole = numel + own_numel
            self._host = torch.empty(whole, dtype=torch.float32, device="cpu", pin_memory=pin)
            self._device = torch.empty_like(self._host, device=device) if pin else self._host
            # What came up, before norms on the device are added to it; else the last header that
            # was packed on the device, there and as the host knows it.
            self._arrived = torch.empty_like(self._device[:numel])
        self._header_values: list[float] = []

    @torch.inference_mode(mode=False)  # or views of the buffers cannot be made where they were not
    def reduce(
        self,
        packed: array[float],
        op: str,
        group: dist.ProcessGroup,
        resident: EncodedNorms | None = None,
    ) -> tuple[torch.Tensor, Copies]:
        """Reduce one rank's buffer over `group`.

        Args:
            packed: [numel], what the host knows.
            op: `sum` or `max`.
            group: Whose ranks all call.
            resident: Norms on the device, added before the reduce.

        Returns:
            The result, [numel] float32 on the host, behind it the rows of `resident`; and what it
            cost.

        Sync: one event, unless the group reduces CPU tensors.
        """
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        host, device = self._host[: self.numel], self._device[: self.numel]
        host.copy_(torch.frombuffer(packed, dtype=torch.float32))
        if self._on_host:
            dist.all_reduce(host, op=reduce_op, group=group)
            return host, Copies(collectives=1)
        down = self.numel + (resident.row_numel if resident else 0)
        # Whichever device is current for the caller.
        with torch.get_device_module(device.device).device(device.device):
            if resident is None:
                device.copy_(host, non_blocking=True)
            else:
                self._header_values = []
                self._arrived.copy_(host, non_blocking=True)
                resident.encode(self._arrived, device, self._device[self.numel : down])
            dist.all_reduce(device, op=reduce_op, group=group)
            self._bring_down(down)
        return self._host[:down], Copies(h2d=1, collectives=1, d2h=1, host_syncs=1)

    @torch.inference_mode(mode=False)
    def sum_on_device(
        self, header: list[float], packed: DeviceLanes, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, Copies]:
        """Sum one rank's buffer, packed on the device, over `group`.

        Returns:
            The result and this rank's own lanes, [numel + those] float32 on the host, and what it
            cost.

        Sync: one event.
        """
        with torch.get_device_module(self._device.device).device(self._device.device):
            self._fill_header(header)
            start, down = len(header), self.numel + packed.own.numel()
            self._device[:start].copy_(self._arrived[:start])
            for name, vote in packed.votes.items():
                self._device[VOTE_PLACES[name]].add_(vote)
            self._device[start : self.numel].copy_(packed.lanes.flatten())
            self._device[self.numel : down].copy_(packed.own.flatten())
            dist.all_reduce(self._device[: self.numel], group=group)
            self._bring_down(down)
        return self._host[:down], Copies(collectives=1, d2h=1, host_syncs=1)

    def _fill_header(self, header: list[float]) -> None:
        """Change what is new in the header; numbers are arguments of the kernels."""
        if len(self._header_values) != len(header):
            self._header_values = [math.nan] * len(header)
        for i, (old, new) in enumerate(zip(self._header_values, header, strict=True)):
            if old != new:
                self._arrived[i].fill_(new)
        self._header_values = header

    def _bring_down(self, numel: int) -> None:
        self._host[:numel].copy_(self._device[:numel], non_blocking=True)
        arrived = torch.get_device_module(self._device.device).Event()
        arrived.record()
        arrived.synchronize()
