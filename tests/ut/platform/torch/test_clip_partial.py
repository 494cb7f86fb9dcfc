"""Partial gradients: the norm of a sum that has not been taken, and what can go wrong with it."""

import math

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from hyper_parallel.platform.torch import pending_sums
from tests.clipping import error_of
from tests.ranks import run_ranks
from tests.sharding import both, dense, local_grad, mesh_of, parameter, parameter_of_shard


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
