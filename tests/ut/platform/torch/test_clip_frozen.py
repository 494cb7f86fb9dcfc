"""`NormReducer(model)` of a model on its devices: clips that the host does not wait for."""

from __future__ import annotations

import math

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import simnpu, triton_interpreter
from tests.ranks import run_ranks
from tests.sharding import Replicate, Shard, local_grad, mesh_of, on_the_host, parameter

pytestmark = [
    pytest.mark.simnpu,
    pytest.mark.triton,
    pytest.mark.skipif(
        not triton_interpreter.is_wanted(), reason="Triton is not installed: make setup"
    ),
]

BACKEND = "cpu:gloo,npu:hccl"


class Model(torch.nn.Module):
    """Weights sharded over four ranks and over two, one replicated, in three dtypes."""

    def __init__(self, *, on_host: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        line, square = mesh_of("hccl", (4,), ("fsdp",)), mesh_of("hccl", (2, 2), ("dp", "fsdp"))
        layouts = [(line, [Shard(0)]), (square, [Replicate(), Shard(0)]), (line, [Replicate()])]
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for i, ((mesh, placements), dtype) in enumerate(zip(layouts, dtypes, strict=True)):
            grad = torch.randn(16, 5, generator=generator).to(dtype)
            weight = parameter(grad, mesh, placements, on_host=on_host)
            self.register_parameter(f"weight{i}", weight)


def local_grads(model: Model) -> list[torch.Tensor]:
    return [local_grad(p).cpu() for p in model.parameters() if p.grad is not None]


def compare(rank: int, norm_type: float, max_norm: float) -> None:
    ours, theirs = Model(), Model()
    frozen = hp.NormReducer(ours)
    result = frozen.clip_(ours.parameters(), max_norm, norm_type)
    expected = hp.NormReducer().clip_(theirs.parameters(), max_norm, norm_type)
    assert result.total_norm.device.type == "npu"
    assert result.clip_coef.device.type == "npu"
    assert result.total_norm.shape == ()
    assert result.total_norm.item() == expected.total_norm.item()
    assert result.clip_coef.item() == expected.clip_coef.item()
    assert result.local_norm.item() == expected.local_norm.item()
    for rank_set, norm in expected.norms_by_rank_set.items():
        assert result.norms_by_rank_set[rank_set].item() == norm.item()
    for a, b in zip(local_grads(ours), local_grads(theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_norm", [1.0, 1e9, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_frozen_clip_has_the_bits_of_one_that_asks(norm_type, max_norm):
    run_ranks(compare, 4, norm_type, max_norm, backend=BACKEND, timeout_s=60)


def count(rank: int) -> dict[str, int]:
    model = Model()
    reducer = hp.NormReducer(model)
    reducer.clip_(model.parameters(), 1.0)
    simnpu.reset_counters()
    result = reducer.clip_(model.parameters(), 0.5)
    counters = simnpu.counters()
    assert result.copies == type(result.copies)(collectives=1)
    assert result.total_norm.item() == pytest.approx(1.0, rel=1e-2)
    norms = [torch.linalg.vector_norm(grad.float()) for grad in local_grads(model)]
    assert max(norms) < 0.5
    return counters


def test_frozen_clip_copies_nothing_and_waits_for_nothing():
    for counters in run_ranks(count, 4, backend=BACKEND, timeout_s=60):
        assert (counters["h2d"], counters["d2h"], counters["host_syncs"]) == (0, 0, 0)
        assert counters["collectives"] == 1
        # Measure and scale per dtype, encode, finish.
        assert counters["kernel_launches"] == 3 + 1 + 1 + 3


def count_after_a_move(rank: int) -> tuple[int, int, int]:
    model = Model()
    reducer = hp.NormReducer(model)
    reducer.clip_(model.parameters(), 1.0)
    keep = [param.grad for param in model.parameters()]
    for param in model.parameters():
        param.grad = param.grad.clone()
    assert keep
    simnpu.reset_counters()
    reducer.clip_(model.parameters(), 0.5)
    counters = simnpu.counters()
    return counters["h2d"], counters["h2d_async"], counters["host_syncs"]


def test_gradients_elsewhere_cost_tables_but_no_wait():
    for h2d, h2d_async, host_syncs in run_ranks(
        count_after_a_move, 4, backend=BACKEND, timeout_s=60
    ):
        assert h2d == h2d_async == 2
        assert host_syncs == 0


def poison(rank: int) -> tuple[float, str]:
    model = Model()
    reducer = hp.NormReducer(model)
    if rank == 2:
        model.weight0.main_grad = on_the_host(model.weight0.grad)
        with pytest.raises(RuntimeError, match=r"weight0.*NaN now") as caught:
            reducer.clip_(model.parameters(), 1.0)
        return math.nan, str(caught.value)
    return reducer.clip_(model.parameters(), 1.0).total_norm.item(), ""


def test_what_was_not_agreed_on_makes_the_norm_nan_and_raises_where_it_is():
    outcomes = run_ranks(poison, 4, backend=BACKEND, timeout_s=60)
    assert all(math.isnan(norm) for norm, _ in outcomes)
    assert "rank 2" in outcomes[2][1]


def bad_request(rank: int) -> float:
    model = Model()
    reducer = hp.NormReducer(model)
    if rank == 1:
        with pytest.raises(ValueError, match="max_norm"):
            reducer.clip_(model.parameters(), -1.0)
        return math.nan
    return reducer.clip_(model.parameters(), 1.0).total_norm.item()


def test_a_request_that_one_rank_cannot_make_leaves_nobody_waiting():
    assert all(map(math.isnan, run_ranks(bad_request, 4, backend=BACKEND, timeout_s=60)))


def ask(rank: int) -> None:
    model = Model()
    if rank == 3:
        local_grad(model.weight0)[0] = math.nan
    with pytest.raises(RuntimeError, match="rank 3"):
        hp.NormReducer(model).clip_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_clip_that_asks_for_an_error_asks_the_others():
    run_ranks(ask, 4, backend=BACKEND, timeout_s=60)


def host_model_on_one(rank: int) -> str:
    model = Model(on_host=rank == 0)
    return hp.NormReducer(model).clip_(model.parameters(), 1.0).clip_coef.device.type


def test_one_rank_off_its_device_keeps_all_from_freezing():
    assert set(run_ranks(host_model_on_one, 4, backend=BACKEND, timeout_s=60)) == {"cpu"}


def without_gradients(rank: int) -> tuple[float, float]:
    model = Model()
    if rank == 1:
        model.zero_grad()
    reducer = hp.NormReducer(model)
    first = reducer.clip_(model.parameters(), 1.0).total_norm.item()
    model.zero_grad()
    return first, reducer.clip_(model.parameters(), 1.0).total_norm.item()


def test_ranks_without_gradients_take_part():
    outcomes = run_ranks(without_gradients, 4, backend=BACKEND, timeout_s=60)
    assert all(first > 0 and second == 0 for first, second in outcomes)


def scale_twice(rank: int) -> None:
    model = Model()
    reducer = hp.NormReducer(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    reducer.clip_(model.parameters(), 1.0, optimizer=optimizer)
    before = local_grads(model)
    with pytest.raises(ValueError, match="next step of an AdamW is to scale weight0; weight1"):
        reducer.clip_(model.parameters(), 1.0)
    assert all(map(torch.equal, local_grads(model), before))
    reducer.clip_(model.parameters(), math.inf)
    reducer.clip_(model.parameters(), math.inf, optimizer=optimizer)
    reducer.clip_(model.parameters(), 1.0)


def test_gradients_that_a_step_is_to_scale_are_not_scaled_too():
    run_ranks(scale_twice, 4, backend=BACKEND, timeout_s=60)
