"""`NormReducer(model)` of a model on its devices: clips that the host does not wait for."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.kernels import triton as kernels
from hyper_parallel.testing import simnpu
from tests.ranks import HOST_AND_NPU, run_ranks
from tests.sharding import (
    Replicate,
    Shard,
    host_dtensor,
    local_grad,
    mesh_of,
    on_the_host,
    parameter,
)

pytestmark = [pytest.mark.simnpu, pytest.mark.triton]


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
    run_ranks(compare, 4, norm_type, max_norm, backend=HOST_AND_NPU, timeout_s=60)


def count(rank: int) -> dict[str, int]:
    model = Model()
    reducer = hp.NormReducer(model)
    reducer.clip_(model.parameters(), 1.0)
    simnpu.reset_counters()
    result = reducer.clip_(model.parameters(), 0.5)
    counters = simnpu.counters()
    assert result.copies == type(result.copies)(collectives=1)
    assert "copies:   none, and no wait" in reducer.explain()
    assert result.total_norm.item() == pytest.approx(1.0, rel=1e-2)
    norms = [torch.linalg.vector_norm(grad.float()) for grad in local_grads(model)]
    assert max(norms) < 0.5
    return counters


def test_frozen_clip_copies_nothing_and_waits_for_nothing():
    for counters in run_ranks(count, 4, backend=HOST_AND_NPU, timeout_s=60):
        assert (counters["h2d"], counters["d2h"], counters["host_syncs"]) == (0, 0, 0)
        assert counters["collectives"] == 1
        # Measure and scale per dtype, encode, finish.
        assert counters["kernel_launches"] == 3 + 1 + 1 + 3


def take_random_steps(rank: int) -> None:
    """Other gradients in every step: which, where, of what dtype and size; other requests."""
    draw = random.Random(3)
    ours, theirs = Model(), Model()
    reducer, asking = hp.NormReducer(ours), hp.NormReducer()
    for step in range(12):
        seed = draw.randrange(1 << 30)
        special = {4: math.nan, 7: -math.inf}.get(step, 1.0)
        keep = [[draw.random() < 0.7 for _ in range(3)] for _ in range(4)][rank]
        max_norm, norm_type = (
            draw.choice([1.0, 0.1, 0, math.inf, 1e39]),
            draw.choice([2, 1, math.inf]),
        )
        results = []
        for model, its in ((ours, reducer), (theirs, asking)):
            give_gradients(model, seed, keep, special if rank == 1 else 1.0)
            listed = list(model.parameters())[rank % 2 if step % 3 == 2 else 0 :]
            with torch.inference_mode(step % 4 == 1):
                results.append(its.clip_(listed, max_norm, norm_type))
        if step == 5:  # the group's layout grows, that of the frozen reducer does not
            mesh = mesh_of("hccl", (2, 2), ("a", "b"))
            asking.clip_([parameter(torch.ones(8), mesh, [Shard(0), Replicate()])], 1.0)
        assert results[0].copies.host_syncs == 0
        ours_then_theirs = [
            [repr(getattr(r, name).item()) for name in ("total_norm", "clip_coef", "local_norm")]
            for r in results
        ]
        assert ours_then_theirs[0] == ours_then_theirs[1], f"step {step}"
        for a, b in zip(main_grads(ours), main_grads(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def give_gradients(model: Model, seed: int, keep: list[bool], factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param, kept in zip(model.parameters(), keep, strict=True):
        size = 10.0 ** (12 * torch.rand((), generator=generator) - 6)
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        grad = (size * torch.randn(16, 5, generator=generator)).to(dtype)
        grad = host_dtensor(grad, param.device_mesh, param.placements, on_host=False)
        grad.to_local().view(-1)[-1:].mul_(factor)
        param.grad, param.main_grad = None, grad if kept else None


def main_grads(model: Model) -> list[torch.Tensor]:
    grads = [param.main_grad for param in model.parameters()]
    return [grad.to_local().cpu() for grad in grads if grad is not None]


def test_steps_that_differ_in_everything_have_the_bits_of_a_reducer_that_asks():
    run_ranks(take_random_steps, 4, backend=HOST_AND_NPU, timeout_s=60)


def take_turns(rank: int) -> set[float]:
    """More models than are remembered on the device."""
    models = [Model() for _ in range(10)]
    turns = [(model, hp.NormReducer(model)) for model in models] * 2
    return {r.clip_(model.parameters(), 1e9).total_norm.item() for model, r in turns}


def test_models_that_take_turns_do_not_get_in_each_others_way():
    assert all(
        len(norms) == 1 for norms in run_ranks(take_turns, 4, backend=HOST_AND_NPU, timeout_s=60)
    )


def forget(rank: int) -> bool:
    model = Model()
    reducer = hp.NormReducer(model)
    reducer.clip_(model.parameters(), 1.0)
    frozen = weakref.ref(reducer._frozen)
    assert frozen() is not None
    del reducer
    gc.collect()
    return frozen() is None


def test_reducer_is_not_kept_alive():
    assert all(run_ranks(forget, 4, backend=HOST_AND_NPU, timeout_s=60))


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
        count_after_a_move, 4, backend=HOST_AND_NPU, timeout_s=60
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
    return clip_in_vain(reducer, model, 1.0), ""


def clip_in_vain(reducer: hp.NormReducer, model: Model, max_norm: float) -> float:
    """Clip where another rank fails: what all norms are then."""
    before = local_grads(model)
    result = reducer.clip_(model.parameters(), max_norm)
    assert result.clip_coef.item() == 1.0
    norms = [result.total_norm, result.local_norm, *result.norms_by_rank_set.values()]
    assert all(norm.isnan() for norm in norms)
    assert all(map(torch.equal, local_grads(model), before))
    return result.total_norm.item()


def test_what_was_not_agreed_on_makes_the_norm_nan_and_raises_where_it_is():
    outcomes = run_ranks(poison, 4, backend=HOST_AND_NPU, timeout_s=60)
    assert all(math.isnan(norm) for norm, _ in outcomes)
    assert "rank 2" in outcomes[2][1]


def break_down(rank: int, method: str) -> tuple[object, float]:
    """A launch that fails on rank 2, and the clip after it."""
    model = Model()
    before = local_grads(model)
    reducer = hp.NormReducer(model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(kernels.Launcher, method, failing)
            with pytest.raises(OSError, match="no space left"):
                reducer.clip_(model.parameters(), 0.5)
            assert all(map(torch.equal, local_grads(model), before))
            first = math.nan
        else:
            first = clip_in_vain(reducer, model, 0.5)
    model = Model()
    return first, reducer.clip_(model.parameters(), 0.5).total_norm.item()


def failing(*arguments: object, **options: object) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize("method", ["partial_norms", "lane_table", "encode"])
def test_launch_that_fails_makes_the_norm_nan_and_the_next_clip_is_right(method):
    outcomes = run_ranks(break_down, 4, method, backend=HOST_AND_NPU, timeout_s=20)
    assert all(math.isnan(first) and second > 0 for first, second in outcomes)


def bad_request(rank: int) -> float:
    model = Model()
    reducer = hp.NormReducer(model)
    if rank == 1:
        with pytest.raises(ValueError, match="max_norm"):
            reducer.clip_(model.parameters(), -1.0)
        return math.nan
    return clip_in_vain(reducer, model, 1.0)


def test_a_request_that_one_rank_cannot_make_leaves_nobody_waiting():
    assert all(map(math.isnan, run_ranks(bad_request, 4, backend=HOST_AND_NPU, timeout_s=60)))


def genuine_nan(rank: int) -> float:
    model = Model()
    if rank == 3:
        local_grad(model.weight0)[0] = math.nan
    result = hp.NormReducer(model).clip_(model.parameters(), 1.0)
    assert result.clip_coef.isnan()
    assert all(grad.isnan().all() for grad in local_grads(model))
    return result.total_norm.item()


def test_gradient_that_is_nan_makes_all_nan_as_in_torch():
    assert all(map(math.isnan, run_ranks(genuine_nan, 4, backend=HOST_AND_NPU, timeout_s=60)))


def ask(rank: int) -> None:
    model = Model()
    if rank == 3:
        local_grad(model.weight0)[0] = math.nan
    with pytest.raises(RuntimeError, match="rank 3"):
        hp.NormReducer(model).clip_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_clip_that_asks_for_an_error_asks_the_others():
    run_ranks(ask, 4, backend=HOST_AND_NPU, timeout_s=60)


def host_model_on_one(rank: int) -> str:
    model = Model(on_host=rank == 0)
    reducer = hp.NormReducer(model)
    assert "copies:   one up and one down in each clip, and one wait" in reducer.explain()
    return reducer.clip_(model.parameters(), 1.0).clip_coef.device.type


def test_one_rank_off_its_device_keeps_all_from_freezing():
    assert set(run_ranks(host_model_on_one, 4, backend=HOST_AND_NPU, timeout_s=60)) == {"cpu"}


def without_gradients(rank: int) -> tuple[float, float]:
    model = Model()
    if rank == 1:
        model.zero_grad()
    reducer = hp.NormReducer(model)
    first = reducer.clip_(model.parameters(), 1.0).total_norm.item()
    model.zero_grad()
    return first, reducer.clip_(model.parameters(), 1.0).total_norm.item()


def test_ranks_without_gradients_take_part():
    outcomes = run_ranks(without_gradients, 4, backend=HOST_AND_NPU, timeout_s=60)
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
    run_ranks(scale_twice, 4, backend=HOST_AND_NPU, timeout_s=60)
