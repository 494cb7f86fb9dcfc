"""Inputs that were reported against other gradient clipping, with the right answers.

Each test names its report. `dense` and `expert` are in tests/sharding.py.
"""

import gc
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from tests.ranks import run_ranks
from tests.sharding import (
    both,
    dense,
    expert,
    host_dtensor,
    local_grad,
    mesh_of,
    parameter,
    parameter_of_shard,
)


def clip_on(num_ranks, backend, make, **options):
    """Clip what `make(rank)` returns; return the norm and the norm afterwards, of each rank."""

    def rank_main(rank):
        params = make(rank)
        norm = clip_grad_norm_(params, 1.0, **options)
        assert not isinstance(norm, DTensor)
        assert norm.dim() == 0
        assert norm.device.type == "cpu"
        p = options.get("norm_type", 2.0)
        after = get_total_norm([q.grad for q in params if q.grad is not None], p)
        return norm.item(), after.item()

    return run_ranks(rank_main, num_ranks, backend=backend)


def assert_norm(results, expected, *, after=1.0, digits=3):
    norms = [norm for norm, _ in results]
    assert len(set(norms)) == 1, f"ranks disagree: {norms}"
    assert norms[0] == pytest.approx(expected, abs=0.51 * 10**-digits)
    assert [value for _, value in results] == pytest.approx([after] * len(results), abs=2e-6)


@both
@pytest.mark.parametrize(("p", "norm"), [(2.0, 903.549), (math.inf, 192.0)])
def test_dense_and_expert_on_different_meshes(backend, p, norm):
    """pytorch#180346, Automodel#3461 (EP, inf norm): mixing meshes raised or crashed."""
    results = clip_on(4, backend, lambda _: [dense(backend), expert(backend)], norm_type=p)
    assert_norm(results, norm)


def test_dense_and_expert_cost_one_all_reduce():
    def rank_main(rank):
        params = [dense("gloo"), expert("gloo")]
        reducer = NormReducer()
        first, second = (reducer.clip_(params, math.inf) for _ in range(2))
        assert first.total_norm == second.total_norm
        return second.copies.collectives

    assert run_ranks(rank_main, 4) == [1, 1, 1, 1]


@both
def test_dense_and_plain_tensor(backend):
    """accelerate#4219, torchtune#2420."""

    def make(rank):
        return [dense(backend), parameter(torch.full((4,), 50.0))]

    assert_norm(clip_on(4, backend, make), 146.424)


@both
def test_dense_and_replicated_dtensor(backend):
    """hyper-parallel#279: 226.804, each replica counted."""

    def make(rank):
        mesh = mesh_of(backend, (4,))
        return [dense(backend), parameter(torch.full((4,), 50.0), mesh, [Replicate()])]

    assert_norm(clip_on(4, backend, make), 146.424)


@both
def test_replicated_and_sharded_on_eight_ranks(backend):
    """TransformerEngine (ROCm)#715."""

    def make(rank):
        mesh = mesh_of(backend, (8,))
        return [
            parameter(torch.ones(4), mesh, [Replicate()]),
            parameter(torch.full((8,), 2.0), mesh, [Shard(0)]),
        ]

    assert_norm(clip_on(8, backend, make), 6.0)


@both
def test_hsdp_counts_each_replica_once(backend):
    """VeOmni#184: 186.676; LlamaFactory#10640, pytorch#170862: a DTensor, or 132 / 2."""

    def make(rank):
        mesh = mesh_of(backend, (2, 2), ("replicate", "shard"))
        placements = [Replicate(), Shard(0)]
        return [
            parameter(torch.arange(1.0, 33.0).reshape(8, 4), mesh, placements),
            parameter(2 * torch.arange(1.0, 17.0).reshape(4, 4), mesh, placements),
        ]

    assert_norm(clip_on(4, backend, make), 132.0)


@both
def test_rank_without_gradient_joins_at_once(backend):
    """Model-Optimizer#1621: the other ranks waited for it."""

    def make(rank):
        param = dense(backend)
        if rank == 3:
            param.grad = None
        return [param]

    def rank_main(rank):
        params = make(rank)
        return clip_grad_norm_(params, 1.0).item()

    assert run_ranks(rank_main, 4, backend=backend) == [70.0] * 4


@both
def test_rank_without_its_expert_gradient(backend):
    """Found while surveying: an expert that no token reached."""

    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        if rank == 3:
            params[1].grad = None
        return clip_grad_norm_(params, 1.0).item()

    norms = run_ranks(rank_main, 4, backend=backend)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(639.944, abs=5e-4)


@both
def test_nan_on_one_rank_reaches_all(backend):
    """verl-omni#539."""

    def rank_main(rank):
        param = dense(backend)
        if rank == 2:
            local_grad(param)[0, 0] = math.nan
        return clip_grad_norm_([param], 1.0).item()

    assert all(math.isnan(norm) for norm in run_ranks(rank_main, 4, backend=backend))


@both
def test_error_if_nonfinite_raises_on_every_rank_and_names_the_culprit(backend):
    """verl-omni#539: gradients stay as they were, and rank and parameter are named."""

    def rank_main(rank):
        module = torch.nn.Module()
        module.fine, module.poisoned = dense(backend), expert(backend)
        if rank == 2:
            local_grad(module.poisoned)[0, 0, 0] = math.nan
            local_grad(module.poisoned)[0, 0, 1] = math.inf
        before = [local_grad(p).clone() for p in module.parameters()]
        with pytest.raises(RuntimeError, match=r"rank 2: poisoned \(1 NaN, 1 inf\)"):
            clip_grad_norm_(module, 1.0, error_if_nonfinite=True)
        for param, grad in zip(module.parameters(), before, strict=True):
            torch.testing.assert_close(local_grad(param), grad, rtol=0, atol=0, equal_nan=True)
        result = NormReducer(module).clip_(module, math.inf)
        return [(g.name, g.num_nan, g.num_inf) for g in result.nonfinite]

    assert run_ranks(rank_main, 4, backend=backend) == [[], [], [("poisoned", 1, 1)], []]


def count_calls(function):
    """Return how many Python and C functions a call runs: its work, without a clock."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_work_grows_linearly_with_the_number_of_dtensors():
    """pytorch#169445: time grew faster than the number of gradients."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        params = [parameter(torch.ones(2), mesh, [Shard(0)]) for _ in range(1000)]
        clip_grad_norm_(params, 0.0)
        return [count_calls(lambda n=n: clip_grad_norm_(params[:n], 0.0)) for n in (500, 1000)]

    for half, whole in run_ranks(rank_main, 2):
        assert whole <= 2.0 * half


def test_two_thousand_small_shards_take_a_few_calls_each():
    """pytorch#133586: slower than `_foreach_norm` on the local tensors; benchmarks measure it."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        params = [parameter(torch.ones(1024), mesh, [Shard(0)]) for _ in range(2000)]
        clip_grad_norm_(params, 1.0)
        return count_calls(lambda: clip_grad_norm_(params, 1.0)) / len(params)

    assert max(run_ranks(rank_main, 2)) < 2


@both
def test_empty_shard_under_the_inf_norm(backend):
    """torchrec#3809, torchrec#3891: 3 rows on 4 ranks."""

    def rank_main(rank):
        grad = torch.arange(1.0, 7.0).reshape(3, 2)
        param = parameter(grad, mesh_of(backend, (4,)), [Shard(0)])
        assert (local_grad(param).numel() == 0) == (rank == 3)
        return clip_grad_norm_([param], 1.0, math.inf).item()

    assert run_ranks(rank_main, 4, backend=backend) == [6.0] * 4


@both
def test_largest_of_three_buckets(backend):
    """VeOmni#758."""

    def make(rank):
        mesh = mesh_of(backend, (2,))
        return [parameter(torch.full((4,), v), mesh, [Shard(0)]) for v in (1.0, 5.0, 3.0)]

    assert_norm(clip_on(2, backend, make, norm_type=math.inf), 5.0)


def test_accumulated_gradient_has_one_norm():
    """DeepSpeed#7967: 3 then 4 is 7; NeMo-RL#1426: four micro-batches, one norm."""

    def rank_main(rank):
        weight = torch.nn.Parameter(torch.zeros(1))
        norms = []
        for slopes in ((3.0, 4.0), (1.0, 0.5, 0.5, 1.0)):
            for slope in slopes:
                (weight * slope).sum().backward()
            norms.append(clip_grad_norm_([weight], math.inf).item())
        return norms

    assert run_ranks(rank_main, 1, backend="none") == [[7.0, 10.0]]


@both
def test_bucket_without_local_parameters(backend):
    """DeepSpeed#5241: the norm of the other bucket, as a tensor."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2,))
        present = parameter(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
        absent = parameter_of_shard(torch.empty(0, 4), mesh, [Shard(0)])
        norm = clip_grad_norm_([absent, present], 1.0)
        assert isinstance(norm, torch.Tensor)
        return norm.item()

    assert run_ranks(rank_main, 2, backend=backend) == [5.0, 5.0]


@both
def test_ddp_gradients_are_equal_already(backend):
    """twinkle#290: [0.8] on two ranks is 0.8, not its root of two fold."""

    def rank_main(rank):
        param = parameter(torch.tensor([0.8]))
        before = param.grad.clone()
        norm = clip_grad_norm_([param], 1.0).item()
        assert torch.equal(param.grad, before)
        return norm

    assert run_ranks(rank_main, 2, backend=backend) == [torch.tensor(0.8).item()] * 2


@both
@pytest.mark.parametrize(("p", "norm"), [(2.0, 0.0), (math.inf, 0.0), (-math.inf, math.inf)])
def test_no_gradient_anywhere_does_not_hang(backend, p, norm):
    """Found while surveying."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2,))
        param = parameter(None, mesh, [Shard(0)], shape=(4,))
        return clip_grad_norm_([param], 1.0, p).item()

    assert run_ranks(rank_main, 2, backend=backend) == [norm, norm]


@both
def test_every_rank_returns_the_same_bits(backend):
    """ColossalAI#2192, SpecForge#663."""

    def rank_main(rank):
        torch.manual_seed(0)
        params = [dense(backend), expert(backend)]
        mesh = mesh_of(backend, (4,))
        params += [
            parameter(torch.randn(33, 3).to(dtype), mesh, [Shard(0)])
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        return [clip_grad_norm_(params, math.inf, p).item() for p in (2.0, 1.0, 3.0, math.inf)]

    assert len({tuple(norms) for norms in run_ranks(rank_main, 4, backend=backend)}) == 1


def test_gradient_of_another_spec_than_its_parameter():
    """The gradient's spec says what it is: here replicated, of a sharded parameter."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        param = parameter(None, mesh, [Shard(0)], shape=(4,))
        param.grad = host_dtensor(torch.full((4,), 2.0), mesh, [Replicate()])
        norm = clip_grad_norm_([param], math.inf).item()
        dist.barrier()
        return norm

    assert run_ranks(rank_main, 2) == [4.0, 4.0]
