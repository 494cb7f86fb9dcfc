"""Steps that are skipped, and those that a GradScaler drives, with a clip left for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import Shard

from hyper_parallel import NormReducer, clip_grad_norm_
from tests.optimizers import assert_equal, divide_, fused, has_lent, make, norm_of, refill_
from tests.ranks import run_ranks
from tests.sharding import both, mesh_of, parameter


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


def test_grad_scaler_after_a_step_that_raised():
    """What that step was lent must not be there for the scaler, which deletes what it sets."""
    params, optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    optimizer.param_groups[0]["betas"] = ("wrong", 0.999)
    with pytest.raises((RuntimeError, TypeError)):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for unscaled in (True, False):
        refill_(params, 4)
        for param in params:
            param.grad *= 1024.0
        if unscaled:
            scaler.unscale_(optimizer)
        clip_grad_norm_(params, 1.0 if unscaled else 1024.0, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert norm_of(params) == pytest.approx(1.0, rel=1e-6)
        assert not has_lent(optimizer)


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


@fused
def test_skipped_first_step_leaves_no_state(kind):
    """Fused SGD of torch 2.13 keeps momentum that it has not written: whatever was in memory."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    params, _ = make()
    others, _ = make()
    optimizer, other = (kind(p, lr=0.1, fused=True, **options) for p in (params, others))
    junk = [torch.full((1000,), 1e30) for _ in range(8)]  # what such memory may hold
    del junk
    params[1].grad[5] = math.nan
    clip_grad_norm_(params, 1.0, optimizer=optimizer, skip_nonfinite=True)
    optimizer.step()
    assert not optimizer.state
    for step in range(2):
        refill_(params, step)
        refill_(others, step)
        optimizer.step()
        other.step()
        assert_equal(params, others)
