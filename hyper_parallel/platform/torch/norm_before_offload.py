"""Take partial norms on the device, a moment before FSDP2 offloads the gradients to the host."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .device_sums import BITS_OF, SamplePlan, measurable_dtypes, measure_chunks
from .early_norms import EarlyNorm, Known, Measurement, drop, keep
from .failure import join_some
from .torch_private import local_tensors, versions_of
from .torch_private_fsdp import FsdpGroup, call_after_backward, fsdp_groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from .torch_private_fsdp import FsdpParameter, Hook

__all__ = ["NormBeforeOffload"]

_logger = logging.getLogger("hyper_parallel")


class NormBeforeOffload:
    """Spares clips of a model the pass over its gradients in host memory.

    FSDP2 with CPU offload has each gradient shard on the device just before it copies it to the
    host. A hook takes its sum of squares there, at the speed of device memory and overlapped with
    the backward pass, and the clip (`clip_grad_norm_`, `get_total_norm`, `NormReducer.clip_`) uses
    it by itself. A gradient whose early norm does not hold takes the host pass as before;
    `ClipResult.host_passes` says how many and why. It holds only if one reduction made the gradient
    and nobody wrote to it since, which the clip checks for each: that it is the same tensor, at the
    same place, with the same version counters, and that five of its elements (two of every 4 Mi
    more) still have the bits that the hook has seen, among them those that a clamp, or a factor
    below 1, would change first.

    Writes that torch does not count (through `.data`, a raw pointer, numpy, or a `_foreach_`
    operator on DTensors) and that also spare all these elements cannot be seen: call `invalidate()`
    after them.

    Works for p = 2, float32, bfloat16 and float16 gradients, and devices with float64; other clips
    take the host pass. So do FSDP2 modules with several parameter groups, groups of which some
    parameter got no gradient, and gradients accumulated over several reductions (use
    `set_requires_gradient_sync(False)` for all backward passes but the last).

    Attributes:
        uncovered: Names of the FSDP2 modules that cannot be hooked, each with the reason.

    Args:
        model: After `fully_shard`, with `CPUOffloadPolicy`. Attached at once; as a context manager
            it detaches at the end.

    Sync: none in the backward pass; per module and pass one asynchronous copy to the host, of 28
        bytes for each shard of up to 4 Mi elements, 16 for each 4 Mi more.

    Memory: on the device, while a module is measured, up to 32 MiB; besides, where FSDP2 divides
        the reduced gradients or casts them, a copy of the module's shards for either. What stays
        until the clip is smaller than the copy to the host.

    Raises:
        ValueError: If no module of the model can be hooked, with the reasons, or one is already.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.uncovered: dict[str, str] = {}
        self._hooks: list[_GroupHook] = []
        for group, name in fsdp_groups(model):
            fault = _fault_of_group(group)
            if group is None or fault is not None:
                self.uncovered[name or "the model"] = str(fault)
            else:
                self._hooks.append(_GroupHook(group))
        if not self._hooks:
            reasons = [f"{name}: {fault}" for name, fault in self.uncovered.items()]
            raise ValueError(
                "expected a model with FSDP2 modules (fully_shard) that offload gradients "
                "(CPUOffloadPolicy) from an accelerator; "
                + (join_some(reasons) or "it has no module of FSDP2")
            )
        self.attach()

    def attach(self) -> None:
        """Take norms from the next backward pass on. A module's own all-reduce hook runs first."""
        taken = [hook.name for hook in self._hooks if hook.is_elsewhere]
        if taken:
            raise ValueError(
                f"{join_some(taken)}: has a NormBeforeOffload already; detach that first"
            )
        for hook in self._hooks:
            hook.attach()

    def detach(self) -> None:
        """Take no more norms, drop those that were taken, and leave modules as they were."""
        for hook in self._hooks:
            hook.detach()

    def invalidate(self) -> None:
        """Drop the norms that were taken: the next clip passes over the gradients themselves."""
        for hook in self._hooks:
            hook.invalidate()

    def __enter__(self) -> NormBeforeOffload:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


class _GroupHook:
    """Measures one parameter group in each backward pass.

    `set_all_reduce_hook` shows it the buffer of all gradients, one padded segment for each, after
    the reduction and before division and cast.
    """

    def __init__(self, group: FsdpGroup) -> None:
        self._group = group
        self._is_attached = False
        self._theirs: Hook | None = None
        self._plan: SamplePlan | None = None
        self._kept: dict[int, Known] = {}
        self._pass = 0  # counts calls, so that what one has queued knows whether it is outdated
        self._has_warned = False
        weakref.finalize(self, drop, self._kept)

    @property
    def name(self) -> str:
        return self._group.name or "the model"

    @property
    def is_elsewhere(self) -> bool:
        """Whether another one of these is attached to the group."""
        return isinstance(self._group.hook, _GroupHook) and self._group.hook is not self

    def attach(self) -> None:
        if not self._is_attached:
            self._theirs = self._group.hook
            self._group.hook = self
            self._is_attached = True
            trained = [p for p in self._group.parameters if p.parameter.requires_grad]
            self._plan_of(trained, self._group.device)  # now, for it blocks

    def detach(self) -> None:
        self.drop()
        if self._is_attached and self._group.hook is self:
            self._group.hook = self._theirs
            self._theirs = None
            self._is_attached = False

    def drop(self) -> None:
        """Forget the last pass, and what it may still have queued."""
        self._pass += 1
        drop(self._kept)
        self._kept.clear()

    def invalidate(self) -> None:
        self._pass += 1
        for known in self._kept.values():
            known.refuse("was invalidated")

    @torch.no_grad()
    def __call__(self, buffer: torch.Tensor) -> None:
        # With a hook FSDP2 goes on with the buffer on this stream, to the copy to the host, but has
        # allocated it on another, which must not have it back before.
        stream = torch.get_device_module(buffer.device).current_stream(buffer.device)
        buffer.record_stream(stream)
        if self._theirs is not None:
            self._theirs(buffer)
        # This buffer goes into the gradients, so whatever was known of them is outdated.
        self.drop()
        segments = [p for p in self._group.parameters if p.parameter.requires_grad]
        faults = [_fault(segment) for segment in segments]
        outcome: _Measured | str = "takes another pass"
        if not all(faults):
            try:
                outcome = self._measure(buffer, segments, stream)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise  # which may be of the reduction that made this buffer
                outcome = "could not be measured on the device"
                self._warn_once(error)
        with contextlib.suppress(RuntimeError):  # not in a backward pass: then nothing is kept
            call_after_backward(
                functools.partial(self._keep, self._pass, outcome, segments, faults)
            )

    def _measure(
        self, buffer: torch.Tensor, segments: Sequence[FsdpParameter], stream: torch.Stream
    ) -> _Measured | str:
        """Queue the work on the current stream. Return what comes of it, or why nothing does."""
        if sum(segment.padded_numel for segment in segments) != buffer.numel():
            return "is reduced with parameters of which some have no gradient"
        gradients = self._group.gradients_of(buffer)
        if gradients.dtype not in measurable_dtypes(buffer.device):
            return f"is {gradients.dtype}"
        plan = self._plan_of(segments, buffer.device)
        sums, places = measure_chunks([gradients[chunk] for chunk in plan.chunks], gradients)
        chosen = torch.cat([plan.sampled, plan.chunk_starts + places])
        bits = gradients.view(BITS_OF[gradients.dtype]).index_select(0, chosen)
        plan.samples.copy_(torch.cat([bits.int(), places.int()]), non_blocking=True)
        arrived = torch.get_device_module(buffer.device).Event()
        arrived.record(stream)
        return _Measured(Measurement(sums, plan.samples, arrived), plan, gradients.dtype)

    def _plan_of(self, segments: Sequence[FsdpParameter], device: torch.device) -> SamplePlan:
        numels = [(segment.padded_numel, segment.numel) for segment in segments]
        if self._plan is None or self._plan.numels != numels:
            self._plan = SamplePlan(numels, device)
        return self._plan

    def _keep(
        self,
        number: int,
        outcome: _Measured | str,
        segments: Sequence[FsdpParameter],
        faults: Sequence[str | None],
    ) -> None:
        """Tie what was measured to the gradients that FSDP2 has made since."""
        if self._pass != number:
            return
        for i, (segment, fault) in enumerate(zip(segments, faults, strict=True)):
            grad = segment.parameter.grad
            if not isinstance(grad, DTensor):
                continue
            (local,) = local_tensors([grad])
            early: EarlyNorm | None = None
            reason = fault
            if isinstance(outcome, str):
                reason = reason or outcome
            else:
                reason = reason or outcome.fault_of(i, local)
                early = None if reason else outcome.early_norm_of(i, segment, grad, local)
            self._kept.update([keep(local, early, reason or "")])

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            _logger.warning(
                "the norms before offload of %s cannot be taken, clips pass over them in host "
                "memory: %s",
                self.name,
                error,
            )
        self._has_warned = True


class _Measured(NamedTuple):
    """What was measured of one buffer.

    Attributes:
        measurement: The sums and samples.
        plan: What they are of.
        dtype: Of the gradients.
    """

    measurement: Measurement
    plan: SamplePlan
    dtype: torch.dtype

    def fault_of(self, i: int, local: torch.Tensor) -> str | None:
        """Say why a shard cannot be what was measured as the i-th segment, if so."""
        is_like = (
            local.is_cpu
            and local.is_contiguous()
            and local.dtype == self.dtype
            and local.numel() == self.plan.numels[i][1]
        )
        return None if is_like else "is not what was measured"

    def early_norm_of(
        self, i: int, segment: FsdpParameter, grad: torch.Tensor, local: torch.Tensor
    ) -> EarlyNorm:
        """Return the part of the i-th segment."""
        return EarlyNorm(
            segment=weakref.ref(segment),
            grad_id=id(grad),
            versions=versions_of(grad, local),
            data_ptr=local.data_ptr(),
            measurement=self.measurement,
            places=self.plan.places[i],
        )


def _fault_of_group(group: FsdpGroup | None) -> str | None:
    """Say why a group cannot be measured early, if so."""
    if group is None:
        return "it has several parameter groups"
    if group.fault is None and not measurable_dtypes(group.device):
        return "its device has no float64, or lacks another operator that this takes"
    return group.fault


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _fault(segment: FsdpParameter) -> str | None:
    """Say why the gradient will not be what this buffer holds of it, if so."""
    if segment.parameter.grad is not None:
        return "was accumulated over several reductions"
    if segment.has_grad_hooks:
        return "has hooks that may change it"
    return None
