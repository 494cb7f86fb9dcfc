"""Models, layouts, backward passes and edits drawn at random, each rank's edits its own.

Whatever a rank does to its gradients, and by whatever way each is measured, all ranks read the
exactly rounded norm of what is in memory, by one collective.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hyper_parallel import NormBeforeOffload, NormReducer
from tests.early import ALL, Model, offloaded, train_once
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import local_grad, mesh_of

pytestmark = pytest.mark.simnpu

MESHES = {
    "1-D": ((4,), ("shard",)),
    "HSDP": ((2, 2), ("replicate", "shard")),
    "DDP": ((4, 1), ("replicate", "shard")),
}
MODELS = 4  # of each mesh, with as many steps of each
# Of one element, chosen at random, unless it says otherwise. Torch counts half of them.
Edit = Callable[[torch.Tensor, int], Any]
EDITS: list[tuple[str, Edit]] = [
    ("counted", lambda x, i: x[i : i + 1].mul_(3.0)),
    ("counted", lambda x, i: x[i : i + 1].fill_(0.0)),
    ("counted", lambda x, _: x.mul_(1 - 2.0**-7)),
    ("huge", lambda x, i: x[i : i + 1].fill_(1e20 if x.dtype == torch.float32 else 1e3)),
    ("tiny", lambda x, _: x.fill_(1e-25 if x.dtype == torch.float32 else 1e-4)),
    ("not counted", lambda x, _: x.data.mul_(0.5)),
    ("not counted", lambda x, _: x.data.mul_(1 - 2.0**-7)),
    ("not counted", lambda x, _: x.data.neg_().add_(1.0)),
    ("not counted", lambda x, i: x.data.clamp_(-x[i].abs() / 2, x[i].abs() / 2)),
    ("none", lambda x, _: x),
]


def draw_model(rng: random.Random, mesh: str) -> tuple[nn.Module, torch.dtype]:
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    reduce_dtype = rng.choice([None, torch.float32])
    shape, names = MESHES[mesh]
    model = offloaded(
        Model().to(dtype),
        mesh_of("hccl", shape, names),
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        reshard_after_forward=rng.random() < 0.5,
    )
    return model, dtype


def draw_backward(rng: random.Random, model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """One backward pass, or several with or without a reduction of their own."""
    passes = rng.choice(["a", "a", "na", "aa", "nna", "ana"])
    for i, kind in enumerate(passes):
        model.set_requires_gradient_sync(kind == "a")
        train_once(model, seed + i, dtype)


def edit(rng: random.Random, model: nn.Module) -> None:
    for param in model.parameters():
        name, change = rng.choice(EDITS)
        local = local_grad(param).view(-1)
        if rng.random() < 0.5 and local.numel() and name != "none":
            change(local, rng.randrange(local.numel()))


@pytest.mark.parametrize("mesh", MESHES)
def test_norm_is_right_whatever_each_rank_does(mesh):
    def rank_main(rank: int) -> list[tuple[float, Fraction, int]]:
        # Copies of a shard are edited alike, for only one of them counts.
        shard = rank % {"1-D": 4, "HSDP": 2, "DDP": 1}[mesh]
        alike, own = random.Random(mesh), random.Random(f"{mesh} {shard}")
        outcomes = []
        for number in range(MODELS):
            torch.manual_seed(number)
            model, dtype = draw_model(alike, mesh)
            NormBeforeOffload(model)
            reducer = NormReducer(model)
            for step in range(MODELS):
                if alike.random() < 0.8:
                    model.zero_grad()
                draw_backward(alike, model, dtype, 10 * step)
                edit(own, model)
                truth = exact_pow_sum(map(local_grad, model.parameters()))
                result = reducer.clip_(model.parameters(), math.inf)
                assert result.copies.collectives == 1
                assert result.num_early + sum(result.host_passes.values()) == ALL
                outcomes.append((result.total_norm.item(), truth, result.num_early))
        return outcomes

    by_rank = run_ranks(rank_main, 4, backend="hccl", timeout_s=55)
    num_shards = {"1-D": 4, "HSDP": 2, "DDP": 1}[mesh]
    for outcomes in zip(*by_rank, strict=True):
        assert len({norm for norm, *_ in outcomes}) == 1
        total = sum((part for _, part, _ in outcomes), Fraction(0)) * num_shards / 4
        assert_rounds_sqrt(torch.tensor(outcomes[0][0]), total)
    nums = [num_early for outcomes in by_rank for *_, num_early in outcomes]
    assert any(nums)
    assert not all(num_early == ALL for num_early in nums)
