"""Gradient clipping over sharded parameters whose gradients may live on the host.

The public functions, with torch's signatures, and the pipeline behind them: collect, measure, pack,
move and reduce, finish, scale. No arithmetic here: it is in the module that each step names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .clip_request import ClipRequest
from .clip_result import ClipResult, Copies, Stopwatch
from .declarations import Declarations, Groups
from .deferred_scaling import Scaling
from .failure import (
    LocalFailure,
    raise_frozen_elsewhere,
    raise_if_any_overflows,
    raise_mismatch,
    raise_nonfinite,
    raise_together,
)
from .finish import LaneTotal, clip_coefficient, round_norm, sum_totals
from .grad_shards import GradShards, collect_grad_shards
from .lanes import UNSHARDED, RankSet
from .local_gradients import LocalGradients
from .norm_reducer import Contribution, ReducedLanes, reduce_lanes
from .parameter_list import ParameterList
from .reduction_groups import ReductionGroup, default_group_reduces, resolve_group
from .replica_spread import families_of
from .torch_private import not_compiled
from .wire_format import PartialNorm, Votes, WireFormat

__all__ = [
    "Call",
    "Parameters",
    "clip",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
]

Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


@not_compiled
def clip_grad_norm_(  # noqa: PLR0913 - torch's arguments and ours
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    foreach: bool | None = None,  # noqa: FBT001
    *,
    group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    sharded_over: Groups | None = None,
    replicated_over: Groups | None = None,
    reproducible: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    skip_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the norm of all gradients taken as one vector, in place, and return that norm.

    The coefficient is min(1, max_norm / (total_norm + 1e-6)), as in torch.nn.utils, whose function
    this replaces. The norm is that of the whole model, whatever mix of meshes its DTensors live
    on and wherever their shards are: one all-reduce over `group`, with one copy up and one down
    if the group cannot reduce CPU tensors.

    Args:
        parameters: A module (errors then use its names), a tensor or an iterable of tensors. Of
            each, `main_grad` if it has one, else `grad`; float32, bfloat16, float16, float64 or
            complex; on the host or a device; strided or sparse COO. One listed twice counts once.
        max_norm: Largest norm; 0 or more. With inf the gradients are measured only.
        norm_type: Any p >= 0, inf or -inf; 0 counts nonzero elements.
        error_if_nonfinite: Raise if the norm is NaN or infinite, before any gradient is changed.
        foreach: False to scale by plain operators, one tensor at a time; else by multi-tensor
            kernels, which give the same bits.
        group: Ranks to reduce over; the default group if None. Pass `reduction_group(mesh)` if some
            ranks of the default group do not train this model.
        pp_group: Ranks that hold different parameters, such as pipeline stages: the group of this
            rank's own place in the stages, inside `group`. If any rank passes one, all must.
        sharded_over: By listed tensor, a group each of whose ranks holds a distinct shard of it
            though no DTensor says so, such as experts; beside the shards of its DTensor, if it is
            one. Every rank of the group passes it, with or without a gradient.
        replicated_over: By listed tensor, a group whose ranks hold copies of it that count once,
            such as embeddings tied over `pp_group`: that of the lowest rank, which must have the
            gradient if any has. All copies are scaled.
        reproducible: Sum squares exactly, so that the norm has the same bits however the gradients
            are sharded and ordered, at about 1.3 times the host pass. p = 2 and no float64;
            Partial gradients are summed by the group first, in its own order.
        optimizer: Leave the scaling to this optimizer's next `step()`, which reads every gradient
            anyway: no pass over memory is spent on it. Any that `torch.amp.GradScaler` drives
            through `grad_scale`: AdamW and Adam with `fused=True`, and SGD if no parameter is a
            DTensor. It must hold the parameters that have gradients, and no others. The step
            divides by float32(1 / coefficient), so that its gradients are within an ulp of
            multiplied ones, and stores them. Every clip replaces what an earlier one has left, and
            until the step these gradients must not be replaced or clipped without it: the step, and
            that clip, would raise.
        skip_nonfinite: Let that step do nothing, on all ranks, if the norm is NaN or infinite on
            any.

    Returns:
        The total norm before clipping: 0-dim, float32 (float64 if any gradient in the group is),
        never a DTensor; on the CPU if all of this rank's gradients are, else on their device.
        Within 0.5 + 2^-20 ulp of the true norm for p = 2, 1 and inf, if it is float32 and devices
        that hold gradients have float64. The norm of nothing is 0 (for -inf: inf).

    Ranks: all of `group`, if any of the parameters is a DTensor or `group`, `pp_group` or
    `sharded_over` is given; else none is asked, as in torch. If a filter may leave a rank without
    any DTensor, use `NormReducer(model)`.

    Raises:
        ValueError: If max_norm is negative or NaN, norm_type is NaN or finite negative, or ranks
            ask for different clips; if no backend of the group can be used; if a group lacks this
            rank, `group` lacks ranks of `pp_group` or of a mesh, or ranks differ on `pp_group`; if
            a declared tensor is not listed, or declarations and DTensors contradict each other; if
            `optimizer` holds other parameters, or the step of another is to scale these.
        TypeError: If a gradient is quantized, meta, Partial of other than sum and avg, or cannot be
            written in place; if `optimizer` cannot scale gradients, or one is float64.
        RuntimeError: If the norm is not finite and error_if_nonfinite, or the reduction fails.
            All on every rank alike, naming ranks and parameters, with no gradient changed.
    """
    asked = functools.partial(
        ClipRequest.validated,
        max_norm,
        norm_type,
        error_if_nonfinite,
        reproducible=reproducible,
        skip_nonfinite=skip_nonfinite,
    )
    scaling = Scaling(foreach is not False, optimizer)
    declare = functools.partial(Declarations.resolved, pp_group, sharded_over, replicated_over)
    call = Call(functools.partial(ParameterList, parameters), asked, declare, scaling)
    reduces = any(arg is not None for arg in (group, pp_group, sharded_over))
    return _clip_listed(call, group, reduces=reduces)


@not_compiled
def get_total_norm(  # noqa: PLR0913
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    foreach: bool | None = None,  # noqa: FBT001
    *,
    group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    sharded_over: Groups | None = None,
    replicated_over: Groups | None = None,
    reproducible: bool = False,
) -> torch.Tensor:
    """Return the norm of all tensors taken as one vector.

    As `clip_grad_norm_` does, whose arguments, ranks and errors are the same, but for gradients
    instead of parameters, and without changing them.
    """
    asked = functools.partial(
        ClipRequest.validated, math.inf, norm_type, error_if_nonfinite, reproducible=reproducible
    )
    declare = functools.partial(Declarations.resolved, pp_group, sharded_over, replicated_over)
    listing = functools.partial(ParameterList, tensors, are_gradients=True)
    reduces = any(arg is not None for arg in (group, pp_group, sharded_over))
    call = Call(listing, asked, declare, Scaling(foreach is not False))
    return _clip_listed(call, group, reduces=reduces)


@not_compiled
@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,  # noqa: FBT001 - torch's signature
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Scale gradients in place by min(1, max_norm / (total_norm + 1e-6)).

    Args:
        parameters: See `clip_grad_norm_`.
        max_norm: See there.
        total_norm: 0-dim, as `get_total_norm` returns it; a DTensor is gathered first.
        foreach: See there.
        optimizer: See there.

    Ranks: none is asked, unless `total_norm` is a DTensor: then all of its mesh.
    Sync: one if `total_norm` is on a device.

    Raises:
        ValueError: If max_norm is negative or NaN, or `optimizer` holds other parameters, or the
            step of another is to scale these.
        TypeError: If a gradient cannot be scaled, or `optimizer` cannot; no gradient is changed.
    """
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()  # before anything that this rank alone may raise
    scaling = Scaling(foreach is not False, optimizer)
    scaling.forget()
    limit = ClipRequest.validated(max_norm).max_norm
    listed = ParameterList(parameters)
    shards = collect_grad_shards(listed)
    scaling.validate(listed, shards)
    wide = torch.float64 if total_norm.dtype == torch.float64 else torch.float32
    coef = float(clip_coefficient(total_norm.to("cpu", wide), limit))
    scaling.apply(shards, coef, skip_step=False)


class Call(NamedTuple):
    """A clip as it was called for. What may raise is called where all ranks learn of it."""

    list_parameters: Callable[[], ParameterList]
    request: Callable[[], ClipRequest]
    declare: Callable[[], Declarations]
    scaling: Scaling


def _clip_listed(call: Call, group: dist.ProcessGroup | None, *, reduces: bool) -> torch.Tensor:
    """Clip over `group`, or the default group.

    A list without any DTensor is local, as in torch, unless an argument says that it `reduces`. One
    that broke off may have had some where such lists were clipped before: all are to hear of it.
    """
    call.scaling.forget()
    if not reduces:
        listed = call.list_parameters()
        call = call._replace(list_parameters=lambda: listed)
        reduces = listed.has_dtensor() or (listed.failure is not None and default_group_reduces())
    return clip(resolve_group(group) if reduces else None, call).total_norm


@torch.no_grad()
def clip(group: ReductionGroup | None, call: Call) -> ClipResult:
    """Clip, and time it. What fails on this rank before the reduce, all ranks raise after it."""
    with Stopwatch() as stopwatch:
        return _take_steps(group, call, stopwatch)


def _take_steps(group: ReductionGroup | None, call: Call, stopwatch: Stopwatch) -> ClipResult:
    """The six steps."""
    cost_before = group.copies if group else Copies()
    local = LocalGradients()

    with LocalFailure() as failure:
        # 1. Collect: parameters to gradient shards with their rank sets.
        request = local.request = call.request()
        declared = local.declared = call.declare()
        local.listed = call.list_parameters()
        shards = collect_grad_shards(local.listed, writable=request.changes_gradients)
        shards = local.shards = declared.place(shards, local.listed)
        _validate_reach(group, declared, shards)
        request.validate_dtypes(shards.dtypes)
        call.scaling.validate(local.listed, shards, request)
        stopwatch.lap("collect")

        # 2. Measure: one pass over the shards whose norm was not taken before they were offloaded.
        local.measure(group)
        stopwatch.lap("measure")

    # 3. Pack: one partial norm per lane, and this rank's votes.
    request, shards = local.request, local.shards
    wire = WireFormat(group.size if group else 1, request.norm_type)
    contribution = _pack(local, failure, wire)
    stopwatch.lap("pack")

    # 4. Move and reduce: one copy up, one all-reduce, one copy down.
    reduced = ReducedLanes(contribution.votes, totals={})
    if group is not None:
        reduced = reduce_lanes(group, contribution, wire, request.stamp)
    local.take_residents()
    agreed = _settle(group, reduced.votes, local, failure)
    stopwatch.lap("reduce")

    # 5. Finish: own lanes and unsharded gradients to the norm, rounded once.
    unsharded = local.combine_by_lane(wire).get(UNSHARDED)
    totals = _totals_of(reduced, unsharded, wire)
    dtype = torch.float64 if agreed.float64_gradient else torch.float32
    norm_of = functools.partial(round_norm, norm_type=request.norm_type, dtype=dtype)
    total_norm = norm_of(sum_totals(totals.values(), request.norm_type))
    if request.error_if_nonfinite and agreed.huge:
        raise_if_any_overflows(group, total_norm, request.norm_type)
    coef = clip_coefficient(total_norm, request.max_norm)
    nonfinite = local.nonfinite if agreed.nonfinite else ()  # before scaling spreads NaN
    stopwatch.lap("finish")

    # 6. Scale: not at all where the coefficient is 1, or an optimizer's next step does it.
    skips_step = request.skip_nonfinite and _is_nonfinite_anywhere(group, agreed, total_norm)
    scaled_bytes, scaled = call.scaling.apply(shards, float(coef), skip_step=skips_step)
    stopwatch.lap("scale")

    return ClipResult(
        total_norm=_on_the_gradients_device(total_norm, shards),
        clip_coef=coef,
        local_norm=norm_of(sum_totals([local.own_total(wire), reduced.early], request.norm_type)),
        norms_by_rank_set={rank_set: norm_of(total) for rank_set, total in totals.items()},
        nonfinite=nonfinite,
        replica_spread=reduced.spread.relative,
        copies=local.fetched + scaled + (group.copies - cost_before if group else Copies()),
        timings=stopwatch.laps,
        host_bytes_read=local.host_bytes_read + scaled_bytes,
        host_bytes_written=scaled_bytes,
        sampled_bytes_read=local.early.sampled_bytes,
        num_early=len(local.early.indices),
        host_passes=local.early.reasons,
        skips_step=skips_step,
    )


def _pack(local: LocalGradients, failure: LocalFailure, wire: WireFormat) -> Contribution:
    by_lane = local.combine_by_lane(wire)
    by_lane.pop(UNSHARDED, None)
    return Contribution(
        by_lane,
        local.votes(wire),
        failure,
        local.shards.pending,
        reproducible=local.request.reproducible,
        declared=local.declared,
        families=families_of(local.shards.distinct_reaches),
        resident=local.resident,
        early=local.early if local.early_stay else None,
    )


def _validate_reach(
    group: ReductionGroup | None, declared: Declarations, shards: GradShards
) -> None:
    """Check that somebody is there to reduce with, if gradients are sharded or staged."""
    num_stages = len(declared.stages or ())
    if group is None and (shards.lane_keys or num_stages > 1):
        raise ValueError(
            "gradients are sharded over several ranks, but there is no process group of more than "
            "one rank to reduce their norm over; initialize torch.distributed before clipping and "
            "pass a group= that holds all ranks of their mesh and pp_group"
        )


def _totals_of(
    reduced: ReducedLanes, unsharded: PartialNorm | None, wire: WireFormat
) -> dict[RankSet, LaneTotal]:
    """Return the totals of own lanes and of the gradients that this rank holds whole."""
    if unsharded is None:
        return dict(reduced.totals)
    own = sum_totals([wire.to_total(unsharded), reduced.early_unsharded], wire.norm_type)
    return {**reduced.totals, UNSHARDED: own}


def _settle(
    group: ReductionGroup | None, votes: Votes | None, local: LocalGradients, failure: LocalFailure
) -> Votes:
    """Return the group's votes, or raise on all ranks what they call for.

    Every branch hangs on votes and request, which are the same on all ranks.
    """
    if votes is not None and votes.frozen and group is not None:
        raise_frozen_elsewhere(group, str(local.request), failure.error)
    if votes is None and group is not None:
        raise_mismatch(group, str(local.request), failure.error)
    if votes is None or votes.error or (group is None and failure.error):
        raise_together(group, failure.error)
    if votes.nonfinite and local.request.error_if_nonfinite:
        raise_nonfinite(group, local.request.norm_type, local.nonfinite)
    return votes


def _is_nonfinite_anywhere(
    group: ReductionGroup | None, agreed: Votes, total_norm: torch.Tensor
) -> bool:
    """Tell, on all ranks alike, whether the norm is NaN or infinite on any of them."""
    if agreed.nonfinite or not agreed.huge:
        return agreed.nonfinite
    overflows = int(total_norm.isinf())
    return any(row[0] for row in group.gather_ints([overflows])) if group else bool(overflows)


def _on_the_gradients_device(norm: torch.Tensor, shards: GradShards) -> torch.Tensor:
    """Return the norm on the CPU if all of this rank's gradients are there, else with the others.

    Sync: none; the value goes along as an argument of the fill.
    """
    if shards.are_plain:
        return norm
    devices = (tensor.device for tensor in shards.tensors)
    device = next((device for device in devices if device.type != "cpu"), norm.device)
    return torch.full((), norm.item(), dtype=norm.dtype, device=device)
