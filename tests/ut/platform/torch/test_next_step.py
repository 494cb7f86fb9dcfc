"""What a clip has left for an optimizer's next step: how long, and for which gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import Shard

from hyper_parallel import NormReducer, clip_grad_norm_
from tests.optimizers import assert_equal, divide_, has_lent, make, refill_
from tests.ranks import run_ranks
from tests.sharding import both, mesh_of, parameter


@pytest.mark.parametrize("second", ["clips", "does not clip", "measures"])
def test_every_clip_replaces_what_was_left(second):
    """The step after the first clip is skipped."""
    params, optimizer = make()
    others, other_optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    max_norm = {"clips": 2.0, "does not clip": 1e6, "measures": math.inf}[second]
    result = NormReducer().clip_(params, max_norm, optimizer=optimizer)
    optimizer.step()
    if second == "clips":
        divide_(others, result.clip_coef.item())
    other_optimizer.step()
    assert_equal(params, others)


def test_clip_that_fails_leaves_nothing_for_the_step():
    params, optimizer = make()
    others, other_optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(params, -1.0, optimizer=optimizer)
    optimizer.step()
    other_optimizer.step()
    assert_equal(params, others)


def test_coefficient_is_for_one_step():
    params, optimizer = make()
    others, other_optimizer = make()
    coef = NormReducer().clip_(params, 1.0, optimizer=optimizer).clip_coef.item()
    divide_(others, coef)
    for _ in range(2):
        optimizer.step()
        other_optimizer.step()
    assert_equal(params, others)


def test_coefficient_of_a_clip_inside_the_closure_holds_for_that_step():
    params, optimizer = make()
    others, other_optimizer = make()
    coefs = []

    def closure():
        refill_(params, 7)
        coefs.append(NormReducer().clip_(params, 1.0, optimizer=optimizer).clip_coef.item())

    clip_grad_norm_(params, 0.5, optimizer=optimizer)  # replaced by the closure's
    optimizer.step(closure)
    refill_(others, 7)
    divide_(others, coefs[0])
    other_optimizer.step()
    assert_equal(params, others)
    assert not has_lent(optimizer)


def test_step_that_raised_does_not_scale_twice():
    params, optimizer = make()
    others, other_optimizer = make()

    def closure():
        raise RuntimeError("data ran out")

    coef = NormReducer().clip_(params, 1.0, optimizer=optimizer).clip_coef.item()
    with pytest.raises(RuntimeError, match="data ran out"):
        optimizer.step(closure)
    optimizer.step()
    divide_(others, coef)
    other_optimizer.step()
    assert_equal(params, others)
    assert not has_lent(optimizer)


@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("unscaled", [True, False])
def test_grad_scaler(unscaled, max_norm):
    """Scaled by 2^10, in both: the norm is of what the clip sees, as in torch."""
    runs = []
    for deferred in (True, False):
        params, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        for step in range(3):
            refill_(params, step)
            for param in params:
                param.grad *= 1024.0
            if unscaled:
                scaler.unscale_(optimizer)
            if deferred:
                clip_grad_norm_(params, max_norm, optimizer=optimizer)
            else:
                coef = NormReducer().clip_(params, math.inf).total_norm
                divide_(params, min(1.0, max_norm / (coef.item() + 1e-6)))
            scaler.step(optimizer)
            scaler.update()
            assert not has_lent(optimizer)
        runs.append(params)
    for param, other in zip(*runs, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-6, atol=0)


def test_grad_scaler_that_skips_a_step_does_not_spoil_the_next():
    params, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    params[0].grad[3] = math.inf
    before = [param.detach().clone() for param in params]
    scaler.unscale_(optimizer)
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, params, before))
    assert scaler.get_scale() == 512.0
    refill_(params, 1)
    for param in params:
        param.grad *= 512.0
    scaler.unscale_(optimizer)
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    scaler.step(optimizer)
    norm = math.sqrt(sum(param.grad.double().square().sum().item() for param in params))
    assert norm == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_skip_nonfinite_skips_one_step(value):
    params, optimizer = make()
    before = [param.detach().clone() for param in params]
    optimizer.step()
    stepped = [param.detach().clone() for param in params]
    assert not any(map(torch.equal, params, before))
    grads = [param.grad.clone() for param in params]
    params[1].grad[5] = value
    result = NormReducer().clip_(params, 1.0, optimizer=optimizer, skip_nonfinite=True)
    assert result.skips_step
    assert result.nonfinite
    optimizer.step()
    assert all(map(torch.equal, params, stepped))
    assert torch.equal(params[0].grad, grads[0])
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}
    assert not has_lent(optimizer)
    refill_(params, 3)
    assert not NormReducer().clip_(params, 1.0, optimizer=optimizer, skip_nonfinite=True).skips_step
    optimizer.step()
    assert not any(map(torch.equal, params, stepped))


@both
@pytest.mark.parametrize(
    "value", [math.nan, 3e38], ids=["NaN on rank 1", "a finite gradient of infinite norm"]
)
def test_all_ranks_skip_alike(backend, value):
    def rank_main(rank):
        grad = torch.ones(4, 2)
        grad[2:] = value  # rank 1's
        param = parameter(grad, mesh_of(backend, (2,)), [Shard(0)])
        optimizer = torch.optim.AdamW([param], fused=True)
        result = NormReducer().clip_([param], 1.0, optimizer=optimizer, skip_nonfinite=True)
        optimizer.step()
        return result.skips_step, param.to_local().any().item()

    assert run_ranks(rank_main, 2, backend=backend) == [(True, False)] * 2
