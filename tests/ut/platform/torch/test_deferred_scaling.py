"""Clips that leave the scaling to the optimizer's next step."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import Shard

from hyper_parallel import NormReducer, clip_grad_norm_, clip_grads_with_norm_
from tests.optimizers import assert_equal, divide_, fused, has_lent, make, refill_
from tests.ranks import run_ranks
from tests.sharding import both, local_grad, mesh_of, parameter


@fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_step_scales_as_dividing_by_the_reciprocal_does(kind, dtype):
    params, optimizer = make(kind, dtype)
    others, other_optimizer = make(kind, dtype)
    for step in range(3):
        before = [param.grad.clone() for param in params]
        result = NormReducer().clip_(params, 1.0, optimizer=optimizer)
        assert result.clip_coef < 0.1
        assert result.host_bytes_written == 0
        assert result.host_bytes_read == sum(param.grad.nbytes for param in params)
        for param, grad in zip(params, before, strict=True):
            assert torch.equal(param.grad, grad)
        optimizer.step()
        divide_(others, result.clip_coef.item())
        other_optimizer.step()
        if dtype == torch.float32:
            assert_equal(params, others)
        for param, other in zip(params, others, strict=True):
            assert torch.equal(param.grad, other.grad)
            # The step itself computes with the quotient before it is rounded to bfloat16.
            torch.testing.assert_close(param, other, rtol=2.0**-7, atol=2.0**-11)
        assert not has_lent(optimizer)
        refill_(params, step)
        refill_(others, step)


def test_scaled_gradients_are_an_ulp_from_those_scaled_in_place():
    params, optimizer = make()
    others, _ = make()
    norm = clip_grad_norm_(params, 1.0, optimizer=optimizer)
    assert torch.equal(norm, clip_grad_norm_(others, 1.0))
    optimizer.step()
    for param, other in zip(params, others, strict=True):
        distance = param.grad.view(torch.int32) - other.grad.view(torch.int32)
        assert distance.abs().max() <= 1


def test_scaling_in_place_reads_and_writes_what_it_says():
    params, _ = make()
    one_pass = sum(param.grad.nbytes for param in params)
    result = NormReducer().clip_(params, 1.0)
    assert (result.host_bytes_read, result.host_bytes_written) == (2 * one_pass, one_pass)
    result = NormReducer().clip_(params, 2.0)
    assert (result.host_bytes_read, result.host_bytes_written) == (one_pass, 0)


def test_max_norm_0_steps_by_zeros():
    params, optimizer = make(torch.optim.SGD)
    before = [param.detach().clone() for param in params]
    clip_grad_norm_(params, 0.0, optimizer=optimizer)
    optimizer.step()
    assert all(map(torch.equal, params, before))
    assert not any(param.grad.any() for param in params)


def test_coefficient_whose_reciprocal_is_beyond_float32_scales_in_place():
    params, optimizer = make(num=1)
    params[0].grad.fill_(3e37 / math.sqrt(1000))
    result = NormReducer().clip_(params, 1e-2, optimizer=optimizer)
    assert 0 < result.clip_coef.item() < 2.0**-128
    assert result.host_bytes_written == params[0].grad.nbytes
    assert params[0].grad[0].item() == pytest.approx(1e-2 / math.sqrt(1000), rel=1e-4)
    optimizer.step()
    assert not has_lent(optimizer)


def test_nonfinite_without_the_option_is_as_in_torch():
    params, optimizer = make(torch.optim.SGD)
    params[0].grad[0] = math.inf
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    optimizer.step()
    assert math.isnan(params[0].grad[0])
    assert not params[0].grad[1:].any()


def test_clip_grads_with_norm_leaves_it_to_the_optimizer_too():
    params, optimizer = make()
    others, other_optimizer = make()
    clip_grads_with_norm_(params, 1.0, torch.tensor(8.0), optimizer=optimizer)
    optimizer.step()
    divide_(others, (1.0 / (torch.tensor(8.0) + 1e-6)).item())
    other_optimizer.step()
    assert_equal(params, others)


@both
def test_sharded_parameters_step_by_the_clipped_gradient(backend):
    """prime-rl#3196: norm 5, max_norm 1; here 4 ranks, two meshes."""

    def rank_main(rank):
        dense = parameter(torch.full((8, 2), 3.0), mesh_of(backend, (4,)), [Shard(0)])
        grid = mesh_of(backend, (2, 2))
        expert = parameter(torch.full((4, 4), 4.0), grid, [Shard(0), Shard(1)])
        groups = [{"params": [dense]}, {"params": [expert]}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
        norm = clip_grad_norm_([dense, expert], 1.0, optimizer=optimizer)
        optimizer.step()
        assert not has_lent(optimizer)
        return (
            norm.item(),
            local_grad(dense).unique().tolist(),
            local_grad(expert).unique().tolist(),
        )

    for norm, dense, expert in run_ranks(rank_main, 4, backend=backend):
        assert norm == 20.0
        assert dense == pytest.approx([3 / 20], rel=1e-6)
        assert expert == pytest.approx([4 / 20], rel=1e-6)
