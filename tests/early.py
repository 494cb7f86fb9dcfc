"""Small FSDP2 models with CPU offload on the simulated NPU, and what clips make of their norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from hyper_parallel import ClipResult, NormBeforeOffload, NormReducer
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import local_grad, mesh_of

__all__ = [
    "ALL",
    "COUNTS",
    "Model",
    "assert_right",
    "compare",
    "counts_of",
    "exact",
    "grads",
    "local_grad",
    "measured",
    "num_groups",
    "offloaded",
    "params",
    "run_case",
    "train_once",
]

ALL = 8  # parameters of Model
COUNTS = ("h2d", "collectives", "d2h", "host_syncs")


class Model(nn.Module):
    """Three blocks; sizes that no number of ranks divides. A block with `unused` skips it."""

    def __init__(self, *, embedding: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 13) if embedding else nn.Identity()
        self.up = nn.Linear(13, 17)
        self.middle = nn.Sequential(nn.Linear(17, 19), nn.GELU(), nn.Linear(19, 17))
        self.down = nn.Linear(17, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.embedding(x))
        result: torch.Tensor = self.down(hidden + self.middle(hidden))
        return result


def offloaded(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard each block and the rest, with parameters and gradients on the host."""
    mesh = mesh or mesh_of("hccl", (torch.distributed.get_world_size(),))
    for block in [model.middle, model] if isinstance(model, Model) else [model]:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(), **options)
    return model


def train_once(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Backward of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + torch.distributed.get_rank())
    if isinstance(model, Model) and isinstance(model.embedding, nn.Embedding):
        batch = torch.randint(0, 29, (3,), generator=generator)
    else:
        batch = torch.randn(6, 13, generator=generator).to(dtype)
    model(batch.to("npu")).float().square().sum().backward()


def compare(
    early: NormBeforeOffload, parameters: Any, reducer: NormReducer | None = None
) -> tuple[ClipResult, ClipResult]:
    """Measure with early norms, and again by the host pass; all it tells must be the same."""
    reducer = reducer or NormReducer()
    parameters = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    first = reducer.clip_(parameters, math.inf)
    early.invalidate()
    second = reducer.clip_(parameters, math.inf)
    assert second.num_early == 0
    assert torch.equal(first.total_norm, second.total_norm)
    assert torch.equal(first.local_norm, second.local_norm)
    assert first.norms_by_rank_set == second.norms_by_rank_set
    return first, second


def exact(parameters: Any) -> Fraction:
    """Return the sum of squares of this rank's gradient shards."""
    return exact_pow_sum(local_grad(p) for p in parameters if p.grad is not None)


def counts_of(counters: dict[str, int]) -> list[int]:
    return [counters[name] for name in COUNTS]


def num_groups(model: nn.Module) -> int:
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def run_case(case: Callable[[int], Any], num_ranks: int = 2) -> list[Any]:
    return run_ranks(case, num_ranks, backend="hccl", timeout_s=30)


def assert_right(results: list[tuple[float, Any]]) -> None:
    """Each rank's norm and exact sum of squares."""
    for norm, _ in results:
        assert_rounds_sqrt(torch.tensor(norm), sum(part for _, part in results))


def measured(model: nn.Module) -> tuple[Any, Any]:
    truth = exact(model.parameters())
    return NormReducer(model).clip_(model.parameters(), math.inf), truth
