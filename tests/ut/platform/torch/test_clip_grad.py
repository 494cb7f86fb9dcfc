"""The clip end to end: upstream's values, and one bit pattern whatever the placement."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import hyper_parallel
from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import (
    both,
    dense,
    device_of,
    expert,
    host_dtensor,
    local_grad,
    mesh_of,
    parameter,
    parameter_of_shard,
)


def seeded(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def assert_same_on_all(values: list[float], expected: float, digits: int = 5) -> None:
    assert len(set(values)) == 1, f"ranks disagree: {values}"
    assert round(values[0], digits) == pytest.approx(expected, abs=0.6 * 10**-digits)


@both
def test_shards_of_two_groups_give_upstreams_norm(backend):
    """hyper-parallel unit tests: four shards of A, two of B; each rank holds one of either."""

    def rank_main(rank):
        a, b = seeded(0, (8, 16), (8, 16))
        mesh = mesh_of(backend, (2, 2), ("replica", "half"))
        on_four = parameter_of_shard(a, mesh_of(backend, (4,), ("all",)), [Shard(0)])
        on_two = parameter_of_shard(b, mesh["half"], [Shard(0)])
        return clip_grad_norm_([on_four, on_two], 1.0).item()

    assert_same_on_all(run_ranks(rank_main, 4, backend=backend), 26.994191)


@both
def test_two_meshes_over_the_same_ranks_share_one_lane_and_one_reduce(backend):
    """hyper-parallel unit tests."""

    def rank_main(rank):
        a, b = seeded(2, (8, 16), (8, 16))
        flat = parameter_of_shard(a, mesh_of(backend, (4,), ("flat",)), [Shard(0)])
        square = parameter_of_shard(b, mesh_of(backend, (2, 2), ("x", "y")), [Shard(0), Shard(1)])
        reducer = NormReducer()
        reducer.clip_([flat, square], math.inf)
        result = reducer.clip_([flat, square], 1.0)
        assert list(result.norms_by_rank_set) == [(0, 1, 2, 3)]
        assert result.copies.collectives == 1
        return result.total_norm.item()

    assert_same_on_all(run_ranks(rank_main, 4, backend=backend), 30.281165)


@both
def test_replicated_gradient_counts_once(backend):
    """hyper-parallel unit tests."""

    def rank_main(rank):
        a, b = seeded(1, (8, 16), (8, 16))
        mesh = mesh_of(backend, (4,), ("all",))
        parameters = [
            parameter_of_shard(a, mesh, [Shard(0)]),
            parameter_of_shard(b, mesh, [Replicate()]),
        ]
        return clip_grad_norm_(parameters, 1.0).item()

    assert_same_on_all(run_ranks(rank_main, 4, backend=backend), 25.565381)


@both
def test_larger_replicated_gradient_counts_once(backend):
    """hyper-parallel unit tests: 15.701258, not 24.815194."""

    def rank_main(rank):
        shard, replicated = seeded(3, (2, 16), (8, 16))
        mesh = mesh_of(backend, (4,), ("all",))
        parameters = [
            parameter_of_shard(shard, mesh, [Shard(0)]),
            parameter_of_shard(replicated, mesh, [Replicate()]),
        ]
        return clip_grad_norm_(parameters, 1.0).item()

    assert_same_on_all(run_ranks(rank_main, 4, backend=backend), 15.701258)


@both
def test_partial_gradient_counts_as_its_sum(backend):
    """hyper-parallel unit tests: 47.443284, not 11.860821; each addend is scaled, hence the sum."""

    def rank_main(rank):
        [a] = seeded(5, (8, 16))
        param = parameter_of_shard(a, mesh_of(backend, (4,), ("all",)), [Partial()])
        norm = clip_grad_norm_([param], 1.0).item()
        return norm, get_total_norm([param.grad]).item()

    results = run_ranks(rank_main, 4, backend=backend)
    assert_same_on_all([norm for norm, _ in results], 47.443284)
    assert [after for _, after in results] == pytest.approx([1.0] * 4, abs=1e-6)


PLACEMENTS = {
    "plain": None,
    "fsdp": ((8,), [Shard(0)]),
    "fsdp-dim1": ((8,), [Shard(1)]),
    "hsdp": ((2, 4), [Replicate(), Shard(0)]),
    "ep-efsdp": ((2, 4), [Shard(0), Shard(1)]),
    "replicated": ((8,), [Replicate()]),
}


def spread(placement: str, grads: list[torch.Tensor], backend: str, num_ranks: int) -> list:
    """Lay gradients out over `num_ranks` ranks: meshes shrink with their number."""
    if PLACEMENTS[placement] is None:
        return [parameter(grad) for grad in grads]
    shape, placements = PLACEMENTS[placement]
    shape = (num_ranks,) if len(shape) == 1 else (min(2, num_ranks), max(1, num_ranks // 2))
    mesh = mesh_of(backend, shape)
    return [parameter(grad, mesh, placements) for grad in grads]


def test_one_bit_pattern_on_1_2_4_and_8_ranks_and_six_placements():
    """And that pattern is the exact norm, rounded once."""
    grads = [*seeded(11, (16, 24), (7, 5), (3,), (1, 33)), seeded(12, (64, 8))[0] * 1e-3]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32]
    grads = [grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
    two_dim = [grad if grad.dim() == 2 else grad.reshape(1, -1) for grad in grads]

    def rank_main(rank, num_ranks):
        del rank
        return {
            (placement, p): get_total_norm(
                [q.grad for q in spread(placement, two_dim, "gloo", num_ranks)], p
            ).item()
            for placement in PLACEMENTS
            for p in (2.0, 1.0, math.inf)
        }

    by_size = [norms for n in (1, 2, 4, 8) for norms in run_ranks(rank_main, n, n)]
    for p in (2.0, 1.0, math.inf):
        assert len({norms[placement, p] for norms in by_size for placement in PLACEMENTS}) == 1
    assert_rounds_sqrt(torch.tensor(by_size[0]["fsdp", 2.0]), exact_pow_sum(grads))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_clips_to_max_norm(backend, dtype):
    def rank_main(rank):
        [grad] = seeded(5, (64, 8))
        param = parameter(grad.to(dtype), mesh_of(backend, (2,)), [Shard(0)])
        norm = clip_grad_norm_([param], 1.0)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not isinstance(norm, DTensor)
        assert norm.device.type == "cpu"
        assert norm > 1.0
        after = get_total_norm([param.grad])
        return norm.item(), after.item()

    results = run_ranks(rank_main, 2, backend=backend)
    assert len(set(results)) == 1
    exact = exact_pow_sum([seeded(5, (64, 8))[0].to(dtype)])
    assert_rounds_sqrt(
        torch.tensor(results[0][0], dtype=torch.promote_types(dtype, torch.float32)), exact
    )
    assert results[0][1] == pytest.approx(1.0, abs=max(2 * torch.finfo(dtype).eps, 1e-7))


@both
def test_complex_gradients_count_by_magnitude(backend):
    def rank_main(rank):
        grad = torch.tensor([3 + 4j, 0, -3j, 4], dtype=torch.complex64)
        param = parameter(grad, mesh_of(backend, (2,)), [Shard(0)])
        norms = [get_total_norm([param.grad], p).item() for p in (2.0, 1.0, math.inf, 0.0)]
        clip_grad_norm_([param], 1.0)
        return norms, get_total_norm([param.grad]).item()

    for norms, after in run_ranks(rank_main, 2, backend=backend):
        assert norms == pytest.approx([50**0.5, 12.0, 5.0, 3.0], rel=1e-7)
        assert after == pytest.approx(1.0, abs=1e-6)


@both
@pytest.mark.parametrize("p", [math.inf, -math.inf, 2.0, 3.0])
def test_float64_gradient_on_one_rank_makes_the_norm_float64_everywhere(backend, p):
    """1 + 2^-40 is lost in float32, also under MAX, whose lanes are float32."""

    def rank_main(rank):
        value = 1.0 + 2.0**-40
        mesh = mesh_of(backend, (4,))
        narrow = parameter(torch.full((4,), 1.0 if p > 0 else 2.0), mesh, [Shard(0)])
        wide = host_dtensor(torch.full((4,), value, dtype=torch.float64), mesh, [Shard(0)])
        grads = [narrow.grad, wide] if rank == 2 else [narrow.grad]
        norm = get_total_norm(grads, p)
        assert norm.dtype == torch.float64
        return norm.item()

    norms = run_ranks(rank_main, 4, backend=backend)
    value = 1.0 + 2.0**-40
    expected = value if math.isinf(p) else (4 + value**p) ** (1 / p)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected, rel=1e-15)


def test_without_torch_distributed_the_same_code_needs_no_collective():
    params = [parameter(torch.tensor([3.0])), parameter(torch.tensor([4.0]).bfloat16())]
    result = NormReducer().clip_(params, 1.0)
    assert result.total_norm.item() == 5.0
    assert result.copies == type(result.copies)()
    assert params[0].grad.item() == pytest.approx(0.6, abs=1e-6)


def test_plain_tensors_are_local_even_with_torch_distributed():
    """As in torch; DDP's gradients are equal on all ranks already."""

    def rank_main(rank):
        param = parameter(torch.full((4,), float(rank + 1)))
        return clip_grad_norm_([param], math.inf).item()

    assert run_ranks(rank_main, 2) == [2.0, 4.0]


@both
def test_device_resident_gradients_give_the_same_bits(backend):
    def rank_main(rank):
        norms = []
        for on_host in (True, False):
            params = [dense(backend, on_host=on_host), expert(backend, on_host=on_host)]
            norm = clip_grad_norm_(params, 1.0)
            expected = "cpu" if on_host else device_of(backend)
            assert norm.device.type == expected
            norms.append((norm.item(), local_grad(params[1]).cpu().sum().item()))
        assert norms[0] == norms[1]
        return norms[0]

    results = run_ranks(rank_main, 4, backend=backend)
    assert round(results[0][0], 3) == 903.549


@pytest.mark.simnpu
def test_device_resident_gradients_cost_no_more_than_host_gradients():
    from hyper_parallel.testing import simnpu

    def rank_main(rank):
        params = [dense("hccl", on_host=False), expert("hccl", on_host=False)]
        reducer = NormReducer()
        reducer.clip_(params, math.inf)
        simnpu.reset_counters()
        copies = reducer.clip_(params, 1.0).copies
        counters = simnpu.counters()
        measured = [counters[k] for k in ("h2d", "collectives", "d2h", "host_syncs")]
        assert measured == [copies.h2d, copies.collectives, copies.d2h, copies.host_syncs]
        return measured

    assert run_ranks(rank_main, 4, backend="hccl") == [[1, 1, 1, 1]] * 4


def test_strided_shard_counts_as_sharded():
    """FSDP2 over EP: (_StridedShard, Shard); its is_shard() is False in torch 2.13."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("efsdp", "ep"))
        [weight] = seeded(9, (8, 4))
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(0)]))
        fully_shard(module, mesh=mesh["efsdp"])
        kinds = [type(placement).__name__ for placement in module.weight.placements]
        assert "_StridedShard" in kinds, kinds
        module.weight.grad = module.weight.detach().clone()
        return clip_grad_norm_(module, 1.0).item()

    norms = run_ranks(rank_main, 4)
    assert len(set(norms)) == 1
    assert_rounds_sqrt(torch.tensor(norms[0]), exact_pow_sum(seeded(9, (8, 4))))


def test_tensor_parallel_with_fsdp_gives_norm_weights_their_own_lanes():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("fsdp", "tp"))
        weight, norm_weight = seeded(21, (8, 4), (6,))
        params = [
            parameter(weight, mesh, [Shard(0), Shard(1)]),
            parameter(norm_weight, mesh, [Shard(0), Replicate()]),
        ]
        result = NormReducer().clip_(params, 1.0)
        column = {0: (0, 2), 1: (1, 3)}[rank % 2]
        assert sorted(result.norms_by_rank_set) == sorted([(0, 1, 2, 3), column])
        return result.total_norm.item()

    norms = run_ranks(rank_main, 4)
    assert len(set(norms)) == 1
    assert_rounds_sqrt(torch.tensor(norms[0]), exact_pow_sum(seeded(21, (8, 4), (6,))))


def test_coefficient_of_one_leaves_gradients_untouched():
    grad = torch.tensor([0.3, -0.4])
    param = parameter(grad)
    before = param.grad._version
    result = NormReducer().clip_([param], 10.0)
    assert result.clip_coef.item() == 1.0
    assert param.grad._version == before


def test_main_grad_comes_before_grad():
    param = parameter(torch.tensor([30.0, 40.0]))
    param.main_grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(param, 1.0).item() == 5.0
    assert param.main_grad.norm().item() == pytest.approx(1.0, abs=1e-6)
    assert param.grad.tolist() == [30.0, 40.0]


def test_clip_grads_with_norm_scales_by_a_norm_given():
    param = parameter(torch.tensor([3.0, 4.0]))
    hyper_parallel.clip_grads_with_norm_([param], 1.0, torch.tensor(5.0))
    assert param.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
    with pytest.raises(ValueError, match="max_norm"):
        hyper_parallel.clip_grads_with_norm_([param], math.nan, torch.tensor(5.0))


def test_clip_grads_with_norm_takes_torchs_dtensor_norm():
    def rank_main(rank):
        param = dense("gloo")
        norm = torch.nn.utils.get_total_norm([param.grad])
        assert isinstance(norm, DTensor)
        hyper_parallel.clip_grads_with_norm_([param], 1.0, norm)
        return get_total_norm([param.grad]).item()

    assert run_ranks(rank_main, 4) == pytest.approx([1.0] * 4, abs=1e-6)


def test_used_up_generator_is_warned_of():
    generator = iter(p for p in [parameter(torch.ones(1))])
    list(generator)
    with pytest.warns(UserWarning, match="used up"):
        assert clip_grad_norm_(generator, 1.0).item() == 0.0


def test_group_is_destroyed_and_made_anew_between_clips(tmp_path):
    def rank_main(rank):
        first = clip_grad_norm_([dense("gloo")], 1.0).item()
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "again"), 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        return first, clip_grad_norm_([dense("gloo")], 1.0).item()

    for first, second in run_ranks(rank_main, 4):
        assert first == second
