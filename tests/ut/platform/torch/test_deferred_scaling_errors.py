"""Optimizers and parameters for which the scaling cannot be left to the next step."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from hyper_parallel import clip_grad_norm_
from tests.optimizers import make
from tests.ranks import run_ranks
from tests.sharding import both, local_grad, mesh_of, parameter


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


def test_fused_sgd_of_dtensors_is_an_error_before_its_step_would_be():
    def rank_main(rank):
        param = parameter(torch.full((4,), 3.0), mesh_of("gloo", (2,)), [Shard(0)])
        optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
        with pytest.raises(TypeError, match=r"SGD that holds DTensors.* AdamW or Adam"):
            clip_grad_norm_([param], 1.0, optimizer=optimizer)
        return local_grad(param).tolist()

    assert run_ranks(rank_main, 2) == [[3.0, 3.0]] * 2


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
