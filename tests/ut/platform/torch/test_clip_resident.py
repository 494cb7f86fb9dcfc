"""Gradients that live on the device, all or some: what a clip costs, and what fails.

On the simulated NPU; the device kernels run in Triton's interpreter. Norms and gradients, case by
case, are in test_clip_residency.py.
"""

from __future__ import annotations

import math

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import simnpu, triton_interpreter
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import Shard, local_grad, mesh_of, parameter

pytestmark = [
    pytest.mark.simnpu,
    pytest.mark.triton,
    pytest.mark.skipif(
        not triton_interpreter.is_wanted(), reason="Triton is not installed: make setup"
    ),
]

BACKEND = "cpu:gloo,npu:hccl"
COUNTERS = ("h2d", "d2h", "collectives", "host_syncs", "early_rewrites")
HOST, MIXED, DEVICE = "host", "mixed", "device"


def is_on_host(where: str, position: int) -> bool:
    return where == HOST or (where == MIXED and position % 2 == 0)


def random_shards(rank: int, where: str) -> list[torch.nn.Parameter]:
    mesh = mesh_of("hccl", (4,), ("fsdp",))
    generator = torch.Generator().manual_seed(5)
    params = []
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32, torch.float16)):
        grad = torch.randn(64, 300 + i, generator=generator).to(dtype)
        params.append(parameter(grad, mesh, [Shard(0)], on_host=is_on_host(where, i)))
    return params


def clip_random(rank: int, where: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    params = random_shards(rank, where)
    before = [local_grad(p).cpu().clone() for p in params]
    result = hp.NormReducer().clip_(params, 1e9)
    return result.total_norm.cpu(), result.local_norm, before


@pytest.mark.parametrize("where", [MIXED, DEVICE])
def test_norm_of_random_shards_is_rounded_once(where):
    outcomes = run_ranks(clip_random, 4, where, backend=BACKEND, timeout_s=60)
    everything = [tensor for *_, shards in outcomes for tensor in shards]
    for total, local, shards in outcomes:
        assert_rounds_sqrt(total, exact_pow_sum(everything))
        assert_rounds_sqrt(local, exact_pow_sum(shards))


def counted(rank: int, where: str) -> tuple[dict[str, int], object]:
    params = random_shards(rank, where)
    reducer = hp.NormReducer()
    reducer.clip_(params, 1.0)
    simnpu.reset_counters()
    result = reducer.clip_(params, 1e-3)
    counters = simnpu.counters()
    launches = counters["kernel_launches"]
    # Three dtypes are measured, the lanes encoded, two or three dtypes on the device scaled.
    assert launches == {MIXED: 2 + 1 + 2, DEVICE: 3 + 1 + 3}[where]
    return {name: counters[name] for name in COUNTERS}, result.copies


@pytest.mark.parametrize("where", [MIXED, DEVICE])
def test_host_and_device_shards_together_cost_one_copy_up_and_one_down(where):
    for counters, copies in run_ranks(counted, 4, where, backend=BACKEND, timeout_s=60):
        assert counters == dict(zip(COUNTERS, (1, 1, 1, 1, 0), strict=True))
        assert (copies.h2d, copies.collectives, copies.d2h, copies.host_syncs) == (1, 1, 1, 1)


def clip_nonfinite(rank: int) -> tuple[str, bool]:
    params = random_shards(rank, DEVICE)
    if rank == 2:
        local_grad(params[1]).view(-1)[17] = math.inf
    before = [local_grad(p).cpu().clone() for p in params]
    with pytest.raises(RuntimeError) as caught:
        hp.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    after = [local_grad(p).cpu() for p in params]
    return str(caught.value), all(map(torch.equal, before, after))


def test_infinity_on_a_device_is_named_before_anything_changes():
    for message, is_unchanged in run_ranks(clip_nonfinite, 4, backend=BACKEND, timeout_s=60):
        assert "rank 2" in message
        assert "parameters[1]" in message
        assert is_unchanged
