"""What backward passes do to gradients that have an early norm already, or are to get one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hyper_parallel import NormBeforeOffload, NormReducer, get_total_norm
from tests.early import (
    ALL,
    Model,
    assert_right,
    exact,
    measured,
    offloaded,
    run_case,
    train_once,
)

pytestmark = pytest.mark.simnpu


def test_optimizer_in_backward():
    """Hooks that run as soon as a gradient is there, one of which frees it."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        middle = list(model.middle.parameters())
        optimizer = torch.optim.SGD(middle[:1], lr=0.1)

        def step(param):
            optimizer.step()
            param.grad = None

        middle[0].register_post_accumulate_grad_hook(step)
        middle[1].register_post_accumulate_grad_hook(lambda param: param.grad.data.mul_(2.0))
        train_once(model, 1)
        result, truth = measured(model)
        assert result.host_passes == {"has hooks that may change it": 1}
        assert result.num_early == ALL - 2
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_accumulation_without_sync_keeps_the_early_norm():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        for micro_batch in range(3):
            model.set_requires_gradient_sync(micro_batch == 2)
            train_once(model, micro_batch)
        result, truth = measured(model)
        assert result.num_early == ALL
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_missing_zero_grad_and_two_synced_backwards():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        results = []
        for step in range(3):
            train_once(model, step)
            result, truth = measured(model)
            assert result.num_early == (ALL if step == 0 else 0)
            if step:
                reasons = {"was accumulated over several reductions": ALL}
                assert result.host_passes == reasons
            results.append((result.total_norm.item(), truth))
        return results

    for step_results in zip(*run_case(case), strict=True):
        assert_right(step_results)


class Branches(nn.Module):
    """Two branches, of which a forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 5)
        self.second = nn.Linear(13, 5)
        self.takes_both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if self.takes_both else self.first(x)


@pytest.mark.parametrize("case", ["unused", "zeros for unused", "frozen", "thawed"])
def test_parameters_without_gradient_in_the_group(case):
    def rank_main(rank):
        torch.manual_seed(0)
        model = Branches()
        if case in ("frozen", "thawed"):
            model.second.requires_grad_(requires_grad=False)
        offloaded(model)
        if case == "zeros for unused":
            model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        NormBeforeOffload(model)
        train_once(model, 0)
        if case == "thawed":
            model.zero_grad()
            model.second.requires_grad_()
            model.takes_both = True
            train_once(model, 1)
        result, truth = measured(model)
        assert result.num_early == {
            "unused": 0, "zeros for unused": 4, "frozen": 2, "thawed": 4
        }[case]  # fmt: skip
        return result.total_norm.item(), truth

    assert_right(run_case(rank_main))


def test_several_models_in_one_list_and_one_without_the_hook():
    def case(rank):
        torch.manual_seed(0)
        models = [offloaded(Model()) for _ in range(3)]
        for model in models[:2]:
            NormBeforeOffload(model)
        for seed, model in enumerate(models):
            train_once(model, seed)
        together = [p for model in models for p in model.parameters()]
        result = NormReducer().clip_(together, math.inf)
        assert result.num_early == 2 * ALL
        assert result.host_passes == {"was not reduced by a module with the hook": ALL}
        one = get_total_norm([p.grad for p in models[1].parameters()])
        return (result.total_norm.item(), exact(together)), (
            one.item(),
            exact(models[1].parameters()),
        )

    for results in zip(*run_case(case), strict=True):
        assert_right(results)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Model):
        def forward(self, x):
            hidden = self.up(self.embedding(x))
            again = checkpoint(self.middle, hidden, use_reentrant=use_reentrant)
            return self.down(hidden + again)

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Checkpointed())
        NormBeforeOffload(model)
        train_once(model, 1)
        result, truth = measured(model)
        assert result.num_early == ALL
        return result.total_norm.item(), truth

    assert_right(run_case(case))
