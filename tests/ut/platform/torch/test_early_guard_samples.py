"""Early norms that hold no longer though no version counter says so, or only seemingly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hyper_parallel import NormBeforeOffload, NormReducer
from hyper_parallel.platform.torch.grad_shards import GradShards
from hyper_parallel.platform.torch.reach import reach_of
from tests.early import (
    ALL,
    Model,
    assert_right,
    grads,
    local_grad,
    measured,
    offloaded,
    run_case,
    train_once,
)

pytestmark = pytest.mark.simnpu


def test_factor_that_the_largest_fraction_rounds_away_is_seen():
    """1 - 2^-8.8 changes powers of two only, of which no fixed sample is one; bfloat16.

    No version counter knows of it; torch's own clip multiplies DTensors so that none does either.
    """

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(nn.Linear(13, 40, bias=False).to(torch.bfloat16))
        early = NormBeforeOffload(model)
        x = torch.ones(1, 13, dtype=torch.bfloat16)
        x[0, 1::2] = 1.5
        x[0, 0], x[0, 6], x[0, 12] = 1.5, 1.5, 1.5
        model(x.to("npu")).sum().backward()
        assert sorted(set(local_grad(model.weight).flatten().tolist())) == [1.0, 1.5]
        before = local_grad(model.weight).clone()
        grads(model)[0].data.mul_(1 - 2.0**-8.8)
        changed = before != local_grad(model.weight)
        assert changed.any()
        assert not changed[before == 1.5].any()
        result, truth = measured(model)
        early.detach()
        return result.total_norm.item(), truth, result.num_early

    results = run_case(case)
    assert_right([result[:2] for result in results])
    assert [num_early for *_, num_early in results] == [0, 0]


def test_step_outdates_what_it_scales():
    """By a factor so near 1 that samples may not tell, and no version counter does."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        NormBeforeOffload(model)
        results = []
        for exponent in (-20, -22, -23):
            model.zero_grad()
            train_once(model, 1)
            norm = NormReducer(model).clip_(model.parameters(), math.inf).total_norm.item()
            max_norm = norm * (1 - 2.0**exponent)
            NormReducer(model).clip_(model.parameters(), max_norm, optimizer=optimizer)
            optimizer.step()
            result, truth = measured(model)
            assert result.host_passes == {"was scaled by an optimizer's step": ALL}
            results.append((result.total_norm.item(), truth))
        return results

    for results in zip(*run_case(case), strict=True):
        assert_right(results)


@pytest.mark.parametrize(
    ("options", "clip_options", "reason"),
    [
        ({}, {"norm_type": 1.0}, "is measured with another norm_type than 2"),
        ({"reproducible": True}, {}, "is measured reproducibly"),
    ],
    ids=["p=1", "reproducible"],
)
def test_clip_that_takes_no_early_norms_says_why(options, clip_options, reason):
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        reducer = NormReducer(model, **options)
        return dict(reducer.clip_(model.parameters(), math.inf, **clip_options).host_passes)

    assert run_case(case) == [{reason: ALL}] * 2


def test_model_can_be_moved_and_cast_with_early_norms_alive():
    """`Module.to` swaps DTensors, and torch swaps none with a weak reference to it."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        results = []
        for move in (lambda: model.to("cpu"), model.float, lambda: model.to(torch.bfloat16)):
            model.zero_grad()
            train_once(model.float(), 1)
            move()
            result, truth = measured(model)
            results.append((result.total_norm.item(), truth))
        assert model.up.weight.grad.dtype == torch.bfloat16
        return results

    for results in zip(*run_case(case), strict=True):
        assert_right(results)


def test_ids_that_come_again_are_not_taken_for_the_old_ones():
    """Of two models each drops its own early norms only, and reasons are not inherited."""
    from hyper_parallel.platform.torch import early_norms

    kept = {}
    first = torch.ones(3)
    kept.update([early_norms.keep(first, None, "was accumulated")])
    wanted = id(first)
    del first
    others = []
    for _ in range(10_000):
        others.append(torch.ones(3))
        if id(others[-1]) == wanted:
            break
    assert id(others[-1]) == wanted
    shards = GradShards(others[-1:], [reach_of(others[-1])], [0])
    reasons = early_norms.find(shards).reasons
    assert reasons == {"was not reduced by a module with the hook": 1}
    own = dict([early_norms.keep(others[-1], None, "has hooks")])
    early_norms.drop(kept)
    assert early_norms.find(shards).reasons == {"has hooks": 1}
    early_norms.drop(own)
    assert early_norms.find(shards).reasons == {}
