"""Gradients that live on the device, all or some, against the same on the host.

On the simulated NPU; the device kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import simnpu, triton_interpreter
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import Replicate, Shard, dense, expert, local_grad, mesh_of, parameter

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


def plain(values: list[float], where: str, position: int) -> torch.nn.Parameter:
    device = "cpu" if is_on_host(where, position) else "npu"
    result = torch.nn.Parameter(torch.zeros(len(values), device=device))
    result.grad = torch.tensor(values, device=device)
    return result


def without_grad(param: torch.nn.Parameter) -> torch.nn.Parameter:
    param.grad = None
    return param


def hsdp(where: str, position: int, scale: float) -> torch.nn.Parameter:
    grad = scale * torch.arange(1.0, 33.0).reshape(8, 4)
    mesh = mesh_of("hccl", (2, 2), ("replicate", "shard"))
    on_host = is_on_host(where, position)
    return parameter(grad, mesh, [Replicate(), Shard(0)], on_host=on_host)


def dense_at(where: str, position: int) -> torch.nn.Parameter:
    return dense("hccl", on_host=is_on_host(where, position))


def expert_at(where: str, position: int) -> torch.nn.Parameter:
    return expert("hccl", on_host=is_on_host(where, position))


def empty_rank(where: str, position: int) -> torch.nn.Parameter:
    grad = torch.arange(1.0, 7.0).reshape(3, 2)
    on_host = is_on_host(where, position)
    return parameter(grad, mesh_of("hccl", (4,), ("fsdp",)), [Shard(0)], on_host=on_host)


def in_dtype(where: str, position: int, dtype: torch.dtype, value: float) -> torch.nn.Parameter:
    grad = torch.full((64, 3), value, dtype=dtype)
    on_host = is_on_host(where, position)
    return parameter(grad, mesh_of("hccl", (4,), ("fsdp",)), [Shard(0)], on_host=on_host)


# Of the cases from public bug reports, those where shards are: parameters by rank and place.
CASES = {
    "dense-expert": lambda rank, at: [dense_at(at, 0), expert_at(at, 1)],
    "dense-plain": lambda rank, at: [dense_at(at, 1), plain([50.0] * 4, at, 0)],
    "dense-expert-lacking-on-one": lambda rank, at: [
        dense_at(at, 0),
        without_grad(expert_at(at, 1)) if rank == 3 else expert_at(at, 1),
    ],
    "hsdp": lambda rank, at: [hsdp(at, 0, 1.0), hsdp(at, 1, 0.5)],
    "empty-rank": lambda rank, at: [empty_rank(at, 1), dense_at(at, 0)],
    "no-gradient-on-one": lambda rank, at: [
        without_grad(dense_at(at, 1)) if rank == 3 else dense_at(at, 1)
    ],
    "huge": lambda rank, at: [in_dtype(at, i, torch.float32, 1e20) for i in range(2)],
    "tiny": lambda rank, at: [in_dtype(at, i, torch.float32, 1e-25) for i in range(2)],
    "half": lambda rank, at: [in_dtype(at, i, torch.float16, 300.0) for i in range(2)],
    "dtypes": lambda rank, at: [
        in_dtype(at, 0, torch.float32, 3.0),
        in_dtype(at, 1, torch.bfloat16, 4.0),
    ],
    "nan-on-one": lambda rank, at: [
        dense_at(at, 0),
        plain([math.nan if rank == 2 else 1.0, math.inf], at, 1),
    ],
    "nothing": lambda rank, at: [without_grad(dense_at(at, i)) for i in range(2)],
}


def clip_case(rank: int, case: str, where: str, norm_type: float) -> tuple[object, ...]:
    params = CASES[case](rank, where)
    total = hp.clip_grad_norm_(params, 1.0, norm_type)
    grads = [local_grad(p).cpu() for p in params if p.grad is not None]
    return repr(total.item()), total.dtype, grads


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_norm_and_gradients_have_the_same_bits_wherever_they_are(case, norm_type):
    on_host, mixed, on_device = (
        run_ranks(clip_case, 4, case, where, norm_type, backend=BACKEND, timeout_s=60)
        for where in (HOST, MIXED, DEVICE)
    )
    for expected, *others in zip(on_host, mixed, on_device, strict=True):
        for other in others:
            assert other[:2] == expected[:2]
            for ours, theirs in zip(other[2], expected[2], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


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
