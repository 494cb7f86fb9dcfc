"""Partial gradients: the norm of a sum that has not been taken, and what can go wrong with it."""

import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from hyper_parallel.platform.torch import pending_sums
from hyper_parallel.platform.torch.clip_result import NonfiniteGradient
from tests.clipping import error_of
from tests.ranks import run_ranks
from tests.sharding import (
    both,
    dense,
    dtensor_of_shard,
    local_grad,
    mesh_of,
    parameter,
    parameter_of_shard,
)


def test_partial_gradients_that_differ_in_size_are_refused_by_all():
    def rank_main(rank):
        mesh = mesh_of("gloo", (4,))
        model = torch.nn.Module()
        model.weight = parameter_of_shard(torch.ones(3 + (rank == 1)), mesh, [Partial()])
        with pytest.raises(ValueError, match="Partial gradient differs") as raised:
            NormReducer(model).clip_(model, 1.0)
        assert local_grad(model.weight).unique().tolist() == [1.0]
        return str(raised.value)

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert "3 torch.float32 elements" in messages[0]
    assert "4 torch.float32 elements" in messages[0]


def test_local_norm_leaves_partial_gradients_out():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        summed = parameter_of_shard(torch.tensor([6.0, 4.0]), mesh, [Partial()])
        plain = parameter(torch.tensor([3.0, 4.0]))
        result = NormReducer().clip_([summed, plain], math.inf)
        return result.local_norm.item(), result.total_norm.item()

    whole = math.sqrt(12**2 + 8**2 + 5**2)
    assert run_ranks(rank_main, 2) == [(5.0, pytest.approx(whole, rel=1e-7))] * 2


def test_partial_gradients_beside_other_parameters_are_matched_by_name_or_refused():
    """By place they would be added to one another's: 0 where 8 is right."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        model = torch.nn.Module()
        for name, value in (("a", 1.0), ("b", -1.0)):
            addend = torch.full((8,), value)
            setattr(model, name, parameter_of_shard(addend, mesh, [Partial()]))
        model.plain = parameter(torch.zeros(3))
        swapped = [model.b, model.a] if rank else [model.a, model.b]
        by_name = NormReducer(model).clip_(swapped, math.inf).total_norm.item()
        error = error_of([model.plain, model.a] if rank else [model.a, model.b], 1.0)
        return by_name, str(error)

    for norm, message in run_ranks(rank_main, 2):
        assert norm == 8.0
        assert "NormReducer(model)" in message


@pytest.mark.parametrize("broken", ["measure", "addend"])
def test_failure_while_partial_gradients_are_added_up_is_raised_by_all(broken):
    def rank_main(rank):
        param = parameter_of_shard(torch.ones(8), mesh_of("gloo", (4,)), [Partial()])
        norm = clip_grad_norm_([param], math.inf).item()
        if rank == 2:
            name = {"measure": "measure", "addend": "_cost_of_copy"}[broken]
            works = getattr(pending_sums, name)

            def fail(*args, **options):
                raise MemoryError("no room")

            setattr(pending_sums, name, fail)
        error = error_of([param], 1.0)
        if rank == 2:
            setattr(pending_sums, name, works)
        return str(error), norm == clip_grad_norm_([param], math.inf).item()

    results = run_ranks(rank_main, 4)
    assert len(set(results)) == 1
    assert "rank 2: MemoryError: no room" in results[0][0]
    assert results[0][1]


@both
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partial_gradient_that_some_ranks_lack(backend, op):
    """2-D: summed over `replicate`, sharded over `shard`; rank 3's addend is missing."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("replicate", "shard"))
        addend = torch.full((5,), float(rank + 1))
        param = parameter_of_shard(addend, mesh, [Partial(op), Shard(0)])
        plain = dense(backend)
        if rank == 3:
            param.grad = None
        norms = [clip_grad_norm_([param, plain], math.inf, p).item() for p in (2.0, math.inf)]
        return norms, get_total_norm([plain.grad]).item()

    share = 1.0 if op == "sum" else 0.5
    sums = torch.cat([torch.full((5,), 1.0 + 3.0), torch.full((5,), 2.0)]).double() * share
    both_grads = torch.cat([sums, torch.arange(1.0, 33.0).double()])
    expected = [torch.linalg.vector_norm(both_grads, p).item() for p in (2.0, math.inf)]
    for norms, after in run_ranks(rank_main, 4, backend=backend):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert round(after, 3) == 106.958


def test_nan_in_a_partial_gradient_reaches_all_ranks():
    def rank_main(rank):
        mesh = mesh_of("gloo", (4,))
        param = parameter_of_shard(torch.ones(6), mesh, [Partial()])
        if rank == 1:
            local_grad(param)[4] = math.nan
        norm = clip_grad_norm_([param], math.inf).item()
        before = local_grad(param).clone()
        with pytest.raises(RuntimeError, match=r"rank 1: parameters\[0\].* \(1 NaN, 0 inf\)"):
            clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
        torch.testing.assert_close(local_grad(param), before, equal_nan=True)
        return norm

    assert all(math.isnan(norm) for norm in run_ranks(rank_main, 4))


@pytest.mark.parametrize("max_norm", [math.inf, 1.0])
def test_only_partial_gradients_that_were_not_finite_before_the_clip_are_named(max_norm):
    """Scaling by a coefficient of NaN makes all gradients NaN."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        model = torch.nn.ParameterDict(
            {n: parameter_of_shard(torch.ones(4), mesh, [Partial()]) for n in ("bad", "fine")}
        )
        if rank == 1:
            local_grad(model["bad"])[2] = math.nan
        return NormReducer(model).clip_(model, max_norm).nonfinite

    assert run_ranks(rank_main, 2) == [(), (NonfiniteGradient("bad", 1, 0),)]


@both
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partial_gradient_of_a_replicated_parameter_is_whole_in_the_next_step(backend, on_host, op):
    """As tensor parallel norm weights are before and after their gradients are added up."""

    def rank_main(rank):
        mesh = mesh_of(backend, (4,))
        param = parameter(torch.zeros(5), mesh, [Replicate()], on_host=on_host)
        whole = dense(backend, on_host=on_host)
        addend = torch.arange(5.0) * (rank + 1)
        total = torch.arange(5.0) * (10.0 if op == "sum" else 2.5)
        reducer = NormReducer()
        norms, costs = [], []
        for grad, placement in [(addend, Partial(op)), (total, Replicate())] * 2:
            local = grad if on_host else grad.to(mesh.device_type)
            param.grad = dtensor_of_shard(local, (5,), mesh, [placement])
            result = reducer.clip_([param, whole], math.inf)
            norms.append(result.total_norm.item())
            costs.append(result.copies.collectives)
        assert costs[1] == costs[3] == 1
        assert costs[2] > 1
        return norms

    scale = 10.0 if op == "sum" else 2.5
    expected = (scale**2 * 30 + 11440) ** 0.5
    for norms in run_ranks(rank_main, 4, backend=backend):
        assert norms == pytest.approx([expected] * 4, rel=1e-7)
        assert len(set(norms)) == 1


@both
def test_partial_gradient_that_only_one_rank_has(backend):
    def rank_main(rank):
        param = parameter_of_shard(
            torch.tensor([3.0, 4.0, 12.0]), mesh_of(backend, (4,)), [Partial()]
        )
        if rank != 2:
            param.grad = None
        return clip_grad_norm_([param], 1.0).item()

    assert run_ranks(rank_main, 4, backend=backend) == [13.0] * 4


@both
def test_one_reduce_scatter_per_chunk_of_a_partial_gradient(backend):
    """Chunks of 64 elements over all ranks; sizes that no number of ranks divides."""
    sizes = [0, 1, 3, 4, 5, 63, 64, 65, 200]

    def rank_main(rank):
        pending_sums.DEVICE_CHUNK_NUMEL = 64
        scatter = pending_sums.reduce_scatter_sum
        results = []
        for numel in sizes:
            shares = []
            pending_sums.reduce_scatter_sum = lambda out, *rest, shares=shares: (
                shares.append(out.numel()) or scatter(out, *rest)
            )
            addend = torch.arange(1.0, numel + 1) * (rank + 1)
            param = parameter_of_shard(addend, mesh_of(backend, (4,)), [Partial()])
            results.append((clip_grad_norm_([param], math.inf).item(), shares))
        return results

    for results in run_ranks(rank_main, 4, backend=backend):
        for numel, (norm, shares) in zip(sizes, results, strict=True):
            exact = 10 * sum(i**2 for i in range(1, numel + 1)) ** 0.5
            assert norm == pytest.approx(exact, rel=1e-6)
            assert len(shares) == -(-numel // 64)
            assert all(share <= 16 for share in shares)


@pytest.mark.simnpu
def test_partial_gradient_needs_device_memory_for_a_chunk_only():
    from hyper_parallel.testing import simnpu

    def rank_main(rank):
        pending_sums.DEVICE_CHUNK_NUMEL = 1 << 14
        param = parameter_of_shard(torch.ones(1 << 20), mesh_of("hccl", (4,)), [Partial()])
        clip_grad_norm_([param], math.inf)
        simnpu.reset_counters()
        before = simnpu.counters()["device_bytes"]
        norm = clip_grad_norm_([param], 1.0).item()
        return norm, simnpu.counters()["device_bytes_peak"] - before

    for norm, extra_bytes in run_ranks(rank_main, 4, backend="hccl"):
        assert norm == 4096.0
        # A chunk, this rank's quarter of it, once more as float64, and small change.
        assert extra_bytes <= 4 * (1 << 14) * 2 < 4 * (1 << 20) / 30
