"""What happens to gradients between backward and clip: the early norm holds, or is not used.

Every case runs on two ranks that edit the gradients as it says, with the exact sum of squares of
what then is in memory as the truth.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel import NormBeforeOffload, NormReducer
from tests.early import (
    ALL,
    Model,
    assert_right,
    exact,
    grads,
    local_grad,
    measured,
    offloaded,
    params,
    run_case,
    train_once,
)
from tests.ranks import HOST_AND_NPU, run_ranks
from tests.reference import assert_rounds_sqrt

pytestmark = pytest.mark.simnpu


def scale_by_raw_pointer(model: nn.Module) -> None:
    for grad in grads(model):
        local = grad.to_local()
        ctypes.memset(local.data_ptr(), 0, local.nbytes)


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad.clone()
        param.grad *= 3


def unscale(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler.unscale_(optimizer)


def all_reduce(model: nn.Module) -> None:
    for grad in grads(model):
        if grad.to_local().shape == grad.shape[:1] and len(grad.to_local()) * 2 == len(grad):
            dist.all_reduce(grad.to_local())
    dist.all_reduce(model.up.weight.grad.to_local().view(-1)[:4])


def swap(model: nn.Module) -> None:
    first, second = model.up.bias, model.middle[2].bias
    first.grad, second.grad = second.grad, first.grad


def swap_data(model: nn.Module) -> None:
    first, second = model.up.bias.grad.to_local(), model.middle[2].bias.grad.to_local()
    kept = first.clone()
    first.data.copy_(second)
    second.data.copy_(kept * 2)


def data_of_another(model: nn.Module) -> None:
    local = model.up.weight.grad._local_tensor
    local.data = local.data * 2


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for grad in grads(model):
            grad.to_local().view(-1)[-1:].add_(1.0)


def arrays(model: nn.Module) -> list[np.ndarray[Any, Any]]:
    return [grad.to_local().detach().numpy() for grad in grads(model)]


def rewrap(param: nn.Parameter) -> None:
    grad = param.grad.mul_(2.0)
    param.grad = DTensor(grad._local_tensor, grad._spec, requires_grad=False)


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "foreach": lambda model: torch._foreach_mul_(grads(model), 0.5),
    "foreach on shards": lambda m: torch._foreach_mul_([g.to_local() for g in grads(m)], 0.5),
    ".data": lambda model: [grad.data.mul_(0.5) for grad in grads(model)],
    ".data of shards": lambda m: [grad.to_local().data.add_(1.0) for grad in grads(m)],
    "raw pointer": scale_by_raw_pointer,
    "set to None": lambda model: setattr(model.up.weight, "grad", None),
    "replaced": replace,
    "replaced by an equal one": lambda m: setattr(m.up.weight, "grad", m.up.weight.grad.clone()),
    "second backward": lambda model: train_once(model, 2),
    "unscaled by a GradScaler": unscale,
    "all-reduced by hand": all_reduce,
    "clip_grad_value_": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "accumulated": lambda model: [grad.add_(1.0) for grad in grads(model)],
    ".grad swapped": swap,
    "elements swapped": swap_data,
    "data of another tensor": data_of_another,
    "one row set to zero": lambda m: m.middle[0].weight.grad.to_local()[1].zero_(),
    "one element, by the DTensor": lambda m: m.middle[0].weight.grad.mul_(m.middle[0].weight < 1),
    "in inference mode": in_inference_mode,
    "a view of its detached self": lambda m: [
        g.to_local().detach().view(-1)[-1:].mul_(3) for g in grads(m)
    ],
    "numpy": lambda model: [np.multiply(a, 3, out=a) for a in arrays(model)],
    "storage": lambda model: [g.to_local().untyped_storage().fill_(0) for g in grads(model)],
    "set_": lambda model: [g.to_local().set_(torch.ones_like(g.to_local())) for g in grads(model)],
    "dlpack": lambda model: [torch.from_dlpack(g.to_local()).mul_(2) for g in grads(model)],
    "out=": lambda model: [torch.add(g.to_local(), 1.0, out=g.to_local()) for g in grads(model)],
    "out= .data": lambda m: [torch.add(g.to_local(), 1.0, out=g.to_local().data) for g in grads(m)],
    "last bits flipped": lambda m: [
        g.to_local().data.view(torch.int32).bitwise_xor_(1) for g in grads(m)
    ],
    "new DTensor of the same shard": lambda model: [rewrap(p) for p in params(model)],
    "clip_grads_with_norm_ of torch": lambda m: torch.nn.utils.clip_grads_with_norm_(
        m.parameters(), 1.0, torch.tensor(5.0)
    ),
    "frozen and thawed": lambda model: model.requires_grad_(requires_grad=False).requires_grad_(),
    "NaN to zero": lambda model: [torch.nan_to_num_(grad) for grad in grads(model)],
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "zeroed, then backward": lambda m: (m.zero_grad(set_to_none=False), train_once(m, 2)),
    "gone": lambda model: model.zero_grad(),
    "gone, then backward": lambda model: (model.zero_grad(), train_once(model, 2)),
    "nothing": lambda model: None,
}


# How many early norms are left; the rest of the cases change all gradients.
LEFT = {
    "set to None": ALL - 1,
    "replaced by an equal one": ALL - 1,
    ".grad swapped": ALL - 2,
    "elements swapped": ALL - 2,
    "data of another tensor": ALL - 1,
    "one row set to zero": ALL - 1,
    "one element, by the DTensor": ALL - 1,
    "gone, then backward": ALL,
    "frozen and thawed": ALL,
    "nothing": ALL,
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[float, Any, int, dict[str, int]]]]:
    """By rank and case: the norm, this rank's exact sum, early norms used, reasons."""

    def rank_main(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        reducer = NormReducer(model)
        results = {}
        for name, edit in EDITS.items():
            model.zero_grad()
            train_once(model, 1)
            edit(model)
            truth = exact(model.parameters())
            result = reducer.clip_(model.parameters(), math.inf)
            reasons = dict(result.host_passes)
            results[name] = (result.total_norm.item(), truth, result.num_early, reasons)
        return results

    return run_ranks(rank_main, 2, backend=HOST_AND_NPU, timeout_s=55)


@pytest.mark.parametrize("name", EDITS)
def test_norm_is_right_after(outcomes, name):
    norm, _, num_early, reasons = outcomes[0][name]
    assert_rounds_sqrt(torch.tensor(norm), sum(outcome[name][1] for outcome in outcomes))
    assert num_early + sum(reasons.values()) == (ALL if name != "gone" else 0) - (
        name == "set to None"
    )
    if name != "all-reduced by hand":
        assert num_early == LEFT.get(name, 0), reasons


def test_scaled_gradient_of_mostly_zeros_is_seen():
    """Version counters miss it, and first, middle and last row are zeros; the largest is not."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model(embedding=True))
        NormBeforeOffload(model)
        train_once(model, 1)
        weight = model.embedding.weight.grad.to_local()
        assert (weight == 0).sum() > weight.numel() / 2
        weight.data.mul_(0.5)
        result, truth = measured(model)
        assert result.num_early == ALL
        assert result.host_passes == {"has other elements than were measured": 1}
        return result.total_norm.item(), truth

    assert_right(run_case(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factor_that_some_elements_round_away_is_seen(dtype):
    """`.data` bumps no counter, and 1 - 2^-8.3 leaves some bfloat16 as they are, but not all."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model().to(dtype))
        NormBeforeOffload(model)
        train_once(model, 1, dtype)
        changed = []
        for grad in grads(model):
            before = grad.to_local().clone()
            grad.data.mul_(1 - 2.0 ** (-8.3 if dtype == torch.bfloat16 else -11.3))
            changed.append(bool((before != grad.to_local()).any()))
        assert any(changed)
        result, truth = measured(model)
        assert result.num_early == ALL - sum(changed)
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_gradients_scaled_by_an_earlier_clip():
    """By kernels that bump no counter, and a coefficient that sampled elements may round away."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        NormReducer(model).clip_(model.parameters(), 1.0)
        result, truth = measured(model)
        assert result.host_passes == {"was scaled by a clip": ALL}
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_gradients_scaled_by_the_optimizer():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        NormBeforeOffload(model)
        train_once(model, 1)
        NormReducer(model).clip_(model.parameters(), 1.0, optimizer=optimizer)
        optimizer.step()
        result, truth = measured(model)
        assert result.num_early == 0
        assert result.total_norm.item() == pytest.approx(1.0, rel=1e-6)
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_raw_write_that_spares_the_samples_needs_invalidate():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        early = NormBeforeOffload(model)
        train_once(model, 1)
        local = model.middle[0].weight.grad.to_local().view(-1)
        spared = {0, local.numel() // 2, local.numel() - 1, int(local.abs().argmax())}
        place = next(i for i in range(local.numel()) if i not in spared and local[i] != 0)
        ctypes.memset(local.data_ptr() + 4 * place, 0, 4)
        seen, _ = measured(model)
        assert seen.num_early == ALL  # as the docstring says
        early.invalidate()
        result, truth = measured(model)
        assert result.host_passes == {"was invalidated": ALL}
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_ranks_need_not_decide_alike():
    """Rank 1 edits one gradient, rank 2 all; all ranks read one norm."""

    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        if rank == 1:
            model.up.weight.grad.to_local().mul_(2.0)
        if rank == 2:
            for grad in grads(model):
                grad.to_local().mul_(3.0)
        result, truth = measured(model)
        assert result.num_early == {0: ALL, 1: ALL - 1, 2: 0}[rank]
        assert result.copies.collectives == 1
        assert (result.copies.h2d, result.copies.d2h) == (int(rank == 2), 1)
        return result.total_norm.item(), truth

    results = run_case(case, 3)
    assert_right(results)


def test_old_gradient_put_back_is_not_taken_for_the_new_one():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        old = grads(model)
        model.zero_grad()
        train_once(model, 2)
        for param, grad in zip(model.parameters(), old[:4], strict=False):
            param.grad = grad
        result, truth = measured(model)
        assert result.num_early == ALL - 4
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_part_of_the_parameters_and_main_grad():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        some = params(model)[2:5]
        some[1].main_grad = (
            DTensor.from_local(
                some[1].grad.to_local().to("npu") * 2, some[1].device_mesh, some[1].placements
            )
            .to_local()
            .cpu()
        )
        result = NormReducer().clip_(some[:1] + some[2:], math.inf)
        assert result.num_early == 2
        truth = exact([some[0], some[2]])
        plain = NormReducer().clip_(some, math.inf)
        assert plain.num_early == 2
        return result.total_norm.item(), truth

    assert_right(run_case(case))


def test_nonfinite_gradient_is_named_on_its_rank():
    def case(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        x = torch.ones(2, 13)
        if rank == 1:
            x[0, 3] = math.nan
        model(x.to("npu")).sum().backward()
        reducer = NormReducer(model)
        result = reducer.clip_(model.parameters(), math.inf)
        assert math.isnan(result.total_norm)
        assert result.num_early == ALL
        with pytest.raises(RuntimeError, match="non-finite") as raised:
            reducer.clip_(model.parameters(), 1.0, error_if_nonfinite=True)
        names = {item.name: item.num_nan for item in result.nonfinite}
        nans = {
            name: int(local_grad(p).isnan().sum())
            for name, p in model.named_parameters()
            if local_grad(p).isnan().any()
        }
        assert names == nans
        return str(raised.value), len(names)

    (text, num_first), (other, num_second) = run_case(case)
    assert text == other
    assert num_first + num_second > 0
    assert "up.weight (" in text
