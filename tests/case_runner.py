"""Run cases of tests/drawn_cases.py on ranks, and check what became of them.

A task for `RankPool` on the simulated NPU: every rank of the pool calls `clip_case`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel import NormReducer
from hyper_parallel.testing import simnpu
from tests.drawn_cases import Case, DrawnMesh, DrawnParameter, Step
from tests.reference import assert_is_norm, elements_of_norm
from tests.sharding import dtensor_of_shard, groupless_mesh

__all__ = ["Outcome", "assert_all_are_right", "assert_all_raise_alike", "clip_case"]


@dataclass(frozen=True)
class Outcome:
    """What one rank made of one step.

    Attributes:
        error: Type and message, or None.
        total_norm: None if there is an error.
        grads: By parameter, the shard afterwards, if the rank had one.
        copies: Copies up, collectives, copies down, host syncs, as the result tells.
        counted: The same as the simulated NPU counted; None on gloo.
    """

    error: tuple[str, str] | None
    total_norm: torch.Tensor | None
    grads: tuple[torch.Tensor | None, ...]
    copies: tuple[int, ...] | None = None
    counted: tuple[int, ...] | None = None


def assert_all_raise_alike(case: Case, step: Step, outcomes: dict[int, Outcome]) -> None:
    assert len({outcome.error for outcome in outcomes.values()}) == 1
    kind, message = outcomes[step.fault.rank].error
    assert kind == (
        "ValueError" if step.fault.kind in ("max_norm", "norm_type") else "RuntimeError"
    )
    names = (f"rank {step.fault.rank}:", f"rank(s) {step.fault.rank}:")
    assert any(name in message for name in names)
    if step.fault.kind == "nan" and case.with_model:
        assert f"p{case.poisoned(step)} (1 NaN, 0 inf)" in message
    for rank, outcome in outcomes.items():
        assert_scaled(case, step, rank, outcome, coef=None)


def assert_all_are_right(case: Case, step: Step, outcomes: dict[int, Outcome]) -> None:
    contributing = {
        parameter.dtype
        for index, parameter in enumerate(case.parameters)
        if step.contributors(index)
    }
    wide = bool(contributing & {torch.float64, torch.complex128})
    dtype = torch.float64 if wide else torch.float32
    averaged = any(parameter.is_partial for parameter in case.parameters)
    relative = {2.0: 2.0**-44, 1.0: 2.0**-44, 3.0: 2.0**-40, 0.5: 2.0**-40}.get(step.norm_type, 0.0)
    relative = max(relative, 2.0**-50 if wide else 0.0)
    for rank, outcome in outcomes.items():
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
        norm = outcome.total_norm
        assert norm.dtype == dtype
        assert type(norm) is torch.Tensor
        assert_is_norm(
            norm,
            elements_of_norm(case, step, rank),
            step.norm_type,
            relative=2.0**-23 if averaged else relative,
        )
        coef = torch.ones_like(norm)
        if step.max_norm != math.inf:
            coef = torch.clamp(step.max_norm / (norm + 1e-6), max=1.0)
        assert_scaled(case, step, rank, outcome, coef=coef)


def assert_scaled(
    case: Case, step: Step, rank: int, outcome: Outcome, *, coef: torch.Tensor | None
) -> None:
    """Assert what the gradients are: listed ones times the coefficient, the others as they were."""
    for index, after in enumerate(outcome.grads):
        if rank not in step.holders[index]:
            assert after is None
            continue
        before = case.local_grad(step, index, rank)
        if coef is not None and coef.item() != 1.0 and rank in step.listers[index]:
            before = _times(before, coef)
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def _times(grad: torch.Tensor, coef: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(grad) if grad.is_complex() else grad
    wide = torch.float64 if parts.dtype == torch.float64 else torch.float32
    scaled = (parts.to(wide) * coef.to(wide)).to(parts.dtype)
    return torch.view_as_complex(scaled) if grad.is_complex() else scaled


# What the ranks do.

_past_groups: list[dist.ProcessGroup] = []


def clip_case(rank: int, case: Case) -> list[Outcome]:
    """Clip the case's model step by step; a rank outside its group only takes part in making it."""
    # Not at once after the draw: another rank might still be reading from this one.
    while _past_groups:
        dist.destroy_process_group(_past_groups.pop())
    group = dist.new_group(list(case.ranks), backend=case.backend)
    if rank not in case.ranks:
        return []
    _past_groups.append(group)
    device_type = "cpu" if case.backend == "gloo" else "npu"
    mesh_of = functools.cache(lambda mesh: groupless_mesh(device_type, mesh.shape, mesh.ranks))
    model = torch.nn.Module()
    for index, parameter in enumerate(case.parameters):
        zeros = torch.zeros_like(parameter.local_grad(0, rank))
        zeros = zeros.to("cpu" if parameter.on_host else "npu")
        weight = torch.nn.Parameter(_placed(zeros, parameter, mesh_of), requires_grad=False)
        model.register_parameter(f"p{index}", weight)
    reducer = NormReducer(
        model if case.with_model else None, group=group, reproducible=case.reproducible
    )
    return [_clip_step(case, step, rank, reducer, model, mesh_of) for step in case.steps]


def _clip_step(
    case: Case,
    step: Step,
    rank: int,
    reducer: NormReducer,
    model: torch.nn.Module,
    mesh_of: Callable[[DrawnMesh], DeviceMesh],
) -> Outcome:
    weights = list(model.parameters())
    shards: list[torch.Tensor | None] = []
    for index, (parameter, weight) in enumerate(zip(case.parameters, weights, strict=True)):
        shard = grad = None
        if rank in step.holders[index]:
            shard = case.local_grad(step, index, rank).to(weight.device)
            grad = _placed(shard, parameter, mesh_of)
        setattr(weight, "main_grad" if parameter.as_main_grad else "grad", grad)
        shards.append(shard)
    listed = [weight for index, weight in enumerate(weights) if rank in step.listers[index]]
    if case.shuffled:
        random.Random(f"{step.seed} {rank}").shuffle(listed)

    kind = step.fault.kind if step.fault and step.fault.rank == rank else None
    norm_type, max_norm = step.norm_type, step.max_norm
    if kind == "norm_type":
        norm_type = 1.0 if norm_type == 2.0 else 2.0
    elif kind == "max_norm":
        max_norm = -1.0
    simulated = simnpu.counters() if case.backend == "hccl" else None
    error = result = counted = None
    try:
        result = reducer.clip_(
            _failing(listed) if kind == "iterable" else listed,
            max_norm,
            norm_type,
            error_if_nonfinite=step.fault is not None and step.fault.kind == "nan",
            foreach=case.foreach,
        )
    except (ValueError, TypeError, RuntimeError) as raised:
        error = type(raised).__name__, str(raised)
    if simulated is not None:
        now = simnpu.counters()
        names = ("h2d", "collectives", "d2h", "host_syncs")
        counted = tuple(now[name] - simulated[name] for name in names)
    return Outcome(
        error=error,
        total_norm=result.total_norm.cpu() if result else None,
        grads=tuple(None if shard is None else shard.cpu() for shard in shards),
        copies=dataclasses.astuple(result.copies) if result else None,
        counted=counted if result else None,
    )


def _failing(listed: list[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    yield from listed
    raise KeyError("the list ends too early")


def _placed(
    shard: torch.Tensor, parameter: DrawnParameter, mesh_of: Callable[[DrawnMesh], DeviceMesh]
) -> torch.Tensor:
    """Return a DTensor with this shard, or the shard itself."""
    if parameter.mesh is None:
        return shard
    return dtensor_of_shard(shard, parameter.shape, mesh_of(parameter.mesh), parameter.placements)
