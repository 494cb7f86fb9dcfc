"""Clips that leave the scaling to the optimizer's next step."""

import math

import pytest
import torch
from torch.distributed.tensor import Shard

from hyper_parallel import NormReducer, clip_grad_norm_, clip_grads_with_norm_
from tests.ranks import run_ranks
from tests.sharding import both, local_grad, mesh_of, parameter

FUSED = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]
fused = pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)


def make(kind=torch.optim.AdamW, dtype=torch.float32, seed=0, num=3):
    """Parameters with gradients of norm about 50 each, and a fused optimizer of them."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for _ in range(num):
        param = torch.nn.Parameter(torch.randn(1000, generator=generator).to(dtype))
        param.grad = (torch.randn(1000, generator=generator) * 1.5).to(dtype)
        params.append(param)
    return params, kind(params, lr=1e-2, fused=True)


def divide_(params, coef):
    """Scale gradients as the step is documented to."""
    divisor = torch.tensor(1.0 / coef, dtype=torch.float32)
    for param in params:
        param.grad = (param.grad.float() / divisor).to(param.dtype)


def refill_(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(1000, generator=generator) * 1.5).to(param.dtype)


def assert_equal(params, others):
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(param.grad, other.grad)


def has_lent(optimizer):
    return [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]


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


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda params: torch.optim.AdamW(params, foreach=True),
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adafactor,
        lambda params: torch.optim.AdamW(
            [{"params": params[:1]}, {"params": params[1:], "fused": False}], fused=True
        ),
        lambda params: "AdamW",
    ],
    ids=["foreach", "default", "sgd", "adafactor", "one group not fused", "no optimizer"],
)
def test_optimizer_that_cannot_scale_is_an_error_with_a_remedy(make_optimizer):
    params, _ = make()
    grads = [param.grad.clone() for param in params]
    with pytest.raises(TypeError, match=r"cannot scale gradients .* fused=True"):
        clip_grad_norm_(params, 1.0, optimizer=make_optimizer(params))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, grads, strict=True))


def test_parameters_that_differ_are_named():
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 2), "down": torch.nn.Linear(2, 2)})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(
        [*model["up"].parameters(), torch.nn.Parameter(torch.ones(3))], fused=True
    )
    with pytest.raises(ValueError, match=r"not in the optimizer: down\.weight; down\.bias\. Pass"):
        clip_grad_norm_(model, 1.0, optimizer=optimizer)
    named = torch.optim.AdamW(model["up"].named_parameters(prefix="up"), fused=True)
    with pytest.raises(ValueError, match=r"not clipped: up\.bias of shape \(2,\)"):
        clip_grad_norm_([model["up"].weight], 1.0, optimizer=named)
    optimizer.param_groups[0]["params"][2].grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"not clipped: param_groups\[0\]\['params'\]\[2\] of"):
        clip_grad_norm_(model["up"].parameters(), 1.0, optimizer=optimizer)
    model["down"].zero_grad()
    optimizer.param_groups[0]["params"][2].grad = None
    clip_grad_norm_(model, 1.0, optimizer=optimizer)  # the others have no gradient


def test_gradient_that_the_step_does_not_read_is_an_error():
    params, optimizer = make()
    params[1].main_grad = torch.ones(1000)
    with pytest.raises(TypeError, match=r"of parameters\[1\] of shape \(1000,\) main_grad is"):
        clip_grad_norm_(params, 1.0, optimizer=optimizer)
    params, optimizer = make(dtype=torch.float64)
    with pytest.raises(TypeError, match="float64 gradients"):
        clip_grad_norm_(params, 1.0, optimizer=optimizer)


def test_options_that_contradict_each_other():
    params, optimizer = make()
    with pytest.raises(ValueError, match="needs optimizer="):
        clip_grad_norm_(params, 1.0, skip_nonfinite=True)
    with pytest.raises(ValueError, match="got both"):
        clip_grad_norm_(
            params, 1.0, error_if_nonfinite=True, optimizer=optimizer, skip_nonfinite=True
        )


@both
@pytest.mark.parametrize("wrong", ["kind", "parameters", "skip"])
def test_error_on_one_rank_is_raised_by_all(backend, wrong):
    def rank_main(rank):
        mesh = mesh_of(backend, (2,))
        params = [parameter(torch.full((4,), 3.0), mesh, [Shard(0)]) for _ in range(2)]
        at_fault = rank == 1
        listed = params[:1] if at_fault and wrong == "parameters" else params
        optimizer = torch.optim.AdamW(listed, fused=not (at_fault and wrong == "kind"))
        skip = at_fault and wrong == "skip"
        with pytest.raises((TypeError, ValueError)) as raised:
            clip_grad_norm_(params, 1.0, optimizer=optimizer, skip_nonfinite=skip)
        optimizer.step()
        assert local_grad(params[0]).tolist() == [3.0, 3.0]
        return str(raised.value)

    text, other = run_ranks(rank_main, 2, backend=backend)
    assert text == other
    assert {
        "kind": "rank 1: TypeError: optimizer= is a AdamW that cannot",
        "parameters": "rank 1: ValueError: optimizer= must hold",
        "skip": "rank(s) 1: ",
    }[wrong] in text


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
