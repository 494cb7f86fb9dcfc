"""Gradients that live on the device, all or some: what a clip costs, and what fails.

On the simulated NPU; the device kernels run in Triton's interpreter. Norms and gradients, case by
case, are in test_clip_residency.py.
"""

from __future__ import annotations

import math

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.kernels import host
from hyper_parallel.kernels import triton as kernels
from hyper_parallel.testing import simnpu
from tests.ranks import HOST_AND_NPU, run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import Shard, local_grad, mesh_of, parameter

pytestmark = [pytest.mark.simnpu, pytest.mark.triton]

COUNTERS = ("h2d", "d2h", "collectives", "host_syncs", "early_rewrites")
HOST, MIXED, DEVICE = "host", "mixed", "device"
WITH_MODEL = ", with a model"


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
    outcomes = run_ranks(clip_random, 4, where, backend=HOST_AND_NPU, timeout_s=60)
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
    for counters, copies in run_ranks(counted, 4, where, backend=HOST_AND_NPU, timeout_s=60):
        assert counters == dict(zip(COUNTERS, (1, 1, 1, 1, 0), strict=True))
        assert (copies.h2d, copies.collectives, copies.d2h, copies.host_syncs) == (1, 1, 1, 1)


def clip_more_than_a_lane_takes(rank: int) -> list[tuple[float, list[torch.Tensor], int]]:
    outcomes = []
    reducer = hp.NormReducer()
    reducer.clip_(random_shards(rank, DEVICE), 1.0)  # the layout is agreed on
    usual = kernels.MAX_TENSORS_PER_LANE
    for limit in (usual, 4, 3):
        kernels.MAX_TENSORS_PER_LANE = limit if rank < 2 else usual
        params = random_shards(rank, DEVICE)
        result = reducer.clip_(params, 1.0)
        grads = [local_grad(p).cpu() for p in params]
        outcomes.append((result.total_norm.item(), grads, result.copies.d2h))
    return outcomes


def test_ranks_with_more_tensors_than_a_lane_takes_fetch_their_norms():
    """The limit is 16384 tensors on the group's device; here 4 reach it, and pass it at 3."""
    by_rank = run_ranks(clip_more_than_a_lane_takes, 4, backend=HOST_AND_NPU, timeout_s=60)
    for rank, outcomes in enumerate(by_rank):
        (total, grads, _), *others = outcomes
        assert [d2h for *_, d2h in outcomes] == [1, 1, 2 if rank < 2 else 1]
        for other_total, other_grads, _ in others:
            assert other_total == total
            assert all(map(torch.equal, other_grads, grads))


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
    for message, is_unchanged in run_ranks(clip_nonfinite, 4, backend=HOST_AND_NPU, timeout_s=60):
        assert "rank 2" in message
        assert "parameters[1]" in message
        assert is_unchanged


def clip_on_two_devices(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    here = parameter(torch.arange(1.0, 33.0), mesh_of("hccl", (4,)), [Shard(0)], on_host=False)
    there, on_host = (
        torch.nn.Parameter(torch.zeros(4, device=device))
        for device in (f"npu:{1 - rank % 2}", "cpu")
    )
    there.grad, on_host.grad = torch.full_like(there, 2.0), torch.full_like(on_host, 3.0)
    params = [there, here, on_host]
    reducer = hp.NormReducer()
    first = reducer.clip_(params, 1.0)
    assert first.total_norm.device == there.device
    left = reducer.clip_(params, math.inf).total_norm
    return first.total_norm.cpu(), left.cpu(), there.grad.cpu()


def test_gradients_on_two_devices_and_the_host():
    elements = [torch.arange(1.0, 33.0), torch.full((4,), 2.0), torch.full((4,), 3.0)]
    for total, left, there in run_ranks(clip_on_two_devices, 4, backend=HOST_AND_NPU, timeout_s=20):
        assert_rounds_sqrt(total, exact_pow_sum(elements))
        assert left.item() == pytest.approx(1, abs=1e-5)
        assert there.tolist() == pytest.approx([2 / total.item()] * 4, rel=1e-6)


def clip_on_a_stream(rank: int, where: str) -> None:
    ours, theirs = random_shards(rank, where), random_shards(rank, where)
    with torch.npu.stream(torch.npu.Stream()):
        norms = [hp.NormReducer().clip_(ours, limit).total_norm for limit in (30.0, 2.0)]
        torch.npu.current_stream().synchronize()
    for norm, limit in zip(norms, (30.0, 2.0), strict=True):
        assert norm.item() == hp.NormReducer().clip_(theirs, limit).total_norm.item()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(local_grad(a).cpu(), local_grad(b).cpu())


@pytest.mark.parametrize("where", [MIXED, DEVICE])
def test_clip_runs_on_the_stream_it_is_called_on(where):
    run_ranks(clip_on_a_stream, 4, where, backend=HOST_AND_NPU, timeout_s=20)


def break_down(rank: int, method: str, norm_type: float) -> tuple[str, bool, float]:
    params = random_shards(rank, MIXED)
    before = [local_grad(p).cpu().clone() for p in params]
    reducer = hp.NormReducer()
    reducer.clip_(params, math.inf, norm_type)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(kernels.Launcher, method, failing)
        with pytest.raises(RuntimeError) as caught:
            reducer.clip_(params, 1.0, norm_type)
    is_unchanged = all(
        torch.equal(old, local_grad(p).cpu()) for old, p in zip(before, params, strict=True)
    )
    norm = reducer.clip_(params, 1.0, norm_type).total_norm.item()
    return str(caught.value), is_unchanged, norm


def failing(*arguments: object, **options: object) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("method", ["partial_norms", "lane_table", "encode"])
def test_launch_that_fails_is_raised_on_all_ranks_with_gradients_as_they_were(method, norm_type):
    outcomes = run_ranks(break_down, 4, method, norm_type, backend=HOST_AND_NPU, timeout_s=20)
    for message, is_unchanged, norm in outcomes:
        assert "rank 2: OSError: no space left on device" in message
        assert is_unchanged
        assert norm > 0


def break_host_pass(rank: int) -> tuple[str, bool]:
    params = random_shards(rank, MIXED)
    before = [local_grad(p).cpu().clone() for p in params]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(host, "partial_norms", failing)
        with pytest.raises(RuntimeError) as caught:
            hp.clip_grad_norm_(params, 1.0)
    after = [local_grad(p).cpu() for p in params]
    return str(caught.value), all(map(torch.equal, before, after))


def test_host_pass_that_fails_beside_norms_on_the_device_is_raised_on_all_ranks():
    for message, is_unchanged in run_ranks(break_host_pass, 4, backend=HOST_AND_NPU, timeout_s=20):
        assert "rank 2: OSError: no space left on device" in message
        assert is_unchanged


def fail_to_scale(rank: int) -> bool:
    params = random_shards(rank, MIXED)
    before = [local_grad(p).cpu().clone() for p in params]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.Launcher, "scale_", failing)
        with pytest.raises(OSError, match="no space left"):
            hp.NormReducer().clip_(params, 1.0)
    return all(map(torch.equal, before, [local_grad(p).cpu() for p in params]))


def test_scaling_that_cannot_be_launched_leaves_host_gradients_as_they_were():
    """pytorch#121020."""
    assert all(run_ranks(fail_to_scale, 4, backend=HOST_AND_NPU, timeout_s=20))


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(grad: torch.Tensor, *, on_host: bool) -> torch.nn.Parameter:
    grad = grad if on_host else grad.to("npu")
    result = torch.nn.Parameter(torch.zeros_like(grad))
    result.grad = grad
    return result


def stages(rank: int, where: str):
    """torchtitan#596, torchtitan#649: PP 2 x FSDP 2, with a bias of its own in each stage."""
    mesh = mesh_of("hccl", (2, 2), ("pp", "fsdp"))
    stage = rank // 2
    weight = parameter(values(stage, 8, 3), mesh["fsdp"], [Shard(0)], on_host=is_on_host(where, 0))
    bias = plain(values(2 + stage, 5), on_host=is_on_host(where, 1))
    exact = [values(s, 8, 3) for s in range(2)] + [values(2 + s, 5) for s in range(2)]
    return [weight, bias], {"pp_group": mesh.get_group("pp")}, exact


def tied(rank: int, where: str):
    """Embeddings tied over the first and the last stage, counted once and scaled on both."""
    mesh = mesh_of("hccl", (2, 2), ("pp", "fsdp"))
    pp = mesh.get_group("pp")
    weight = parameter(values(rank // 2, 8), mesh["fsdp"], [Shard(0)], on_host=is_on_host(where, 0))
    embedding = plain(values(4, 6), on_host=is_on_host(where, 1))
    exact = [values(0, 8), values(1, 8), values(4, 6)]
    return [weight, embedding], {"pp_group": pp, "replicated_over": {embedding: pp}}, exact


def experts(rank: int, where: str):
    """Experts outside DTensor, beside FSDP over all ranks and FSDP over efsdp with EP by hand."""
    mesh = mesh_of("hccl", (2, 2), ("efsdp", "ep"))
    ep = mesh.get_group("ep")
    dense = parameter(values(7, 8), mesh, [Shard(0), Shard(0)], on_host=is_on_host(where, 0))
    expert = plain(values(rank % 2, 5), on_host=is_on_host(where, 1))
    half = parameter(
        values(9 + rank % 2, 4, 3), mesh["efsdp"], [Shard(0)], on_host=is_on_host(where, 1)
    )
    exact = [values(0, 5), values(1, 5), values(7, 8), values(9, 4, 3), values(10, 4, 3)]
    return [dense, expert, half], {"sharded_over": {expert: ep, half: ep}}, exact


def clip_declared(rank: int, make, where: str) -> list[object]:
    params, declared, exact = make(rank, where.removesuffix(WITH_MODEL))
    model = torch.nn.ParameterList(params) if where.endswith(WITH_MODEL) else None
    reducer = hp.NormReducer(model, **declared)
    outcome: list[object] = []
    for norm_type, max_norm in ((2.0, math.inf), (1.0, math.inf), (math.inf, 1.0)):
        total = reducer.clip_(params, max_norm, norm_type).total_norm
        if norm_type == 2.0:
            assert_rounds_sqrt(total.cpu(), exact_pow_sum(exact))
        outcome.append(total.item())
    return [*outcome, *(local_grad(p).cpu().tolist() for p in params)]


@pytest.mark.parametrize("make", [stages, tied, experts])
def test_what_is_declared_has_the_same_bits_wherever_it_is(make):
    on_host, *others = (
        run_ranks(clip_declared, 4, make, where, backend=HOST_AND_NPU, timeout_s=20)
        for where in (HOST, MIXED, DEVICE, DEVICE + WITH_MODEL)
    )
    assert all(outcome == on_host for outcome in others)
