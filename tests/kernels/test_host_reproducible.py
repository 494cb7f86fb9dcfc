"""`reproducible=True`: one bit pattern for any sharding, order and number of ranks."""

import math

import pytest
import torch

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from hyper_parallel.platform.torch import partial_norms
from hyper_parallel.platform.torch.partial_norms import measure
from tests.kernels.host_inputs import DTYPES, EXACT_DTYPES, any_bits, normal
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import Shard, local_grad, mesh_of, parameter


def gradient(dtype, seed=0):
    """Return 64 x 90 elements whose float64 sum of squares depends on their order."""
    exponents = torch.arange(64 * 90) % 24 - 12
    return (normal(64 * 90, dtype, seed) * torch.exp2(exponents).to(dtype)).view(64, 90)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_ranks_and_shards_do_not_change_a_bit(dtype):
    full = [gradient(dtype, seed) for seed in range(3)]
    [expected] = {get_total_norm(full, reproducible=True).item()}
    norm = torch.tensor(expected, dtype=torch.float32)
    assert_rounds_sqrt(norm, exact_pow_sum(full))

    def rank_main(rank, num_ranks):
        del rank
        mesh = mesh_of("gloo", (num_ranks,), ("fsdp",))
        by_rows = [parameter(grad, mesh, [Shard(0)]) for grad in full]
        by_columns = [parameter(grad, mesh, [Shard(1)]) for grad in reversed(full)]
        mixed = [by_rows[0], by_columns[1], parameter(full[2])]
        reducer = NormReducer(reproducible=True)
        first = reducer.clip_(by_rows, math.inf).total_norm.item()
        second = reducer.clip_(mixed, math.inf).total_norm.item()
        last = clip_grad_norm_(by_columns, expected / 2, reproducible=True).item()
        scaled = local_grad(by_columns[0]).double().square().sum().item()
        return first, second, last, scaled

    for num_ranks in (1, 2, 4, 8):
        for first, second, last, _ in run_ranks(rank_main, num_ranks, num_ranks):
            assert first == second == last == expected


def test_float64_sums_do_depend_on_the_order():
    """Else the tests here would prove nothing."""
    tensor = gradient(torch.float32).flatten()
    generator = torch.Generator().manual_seed(0)
    orders = [tensor[torch.randperm(tensor.numel(), generator=generator)] for _ in range(10)]
    plain = {measure([order], 2.0)[0][0].value for order in orders}
    exact = {measure([order], 2.0, reproducible=True)[0][0].grid_sum for order in orders}
    assert len(plain) > 1
    assert len(exact) == 1


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_strides_and_missing_kernels_do_not_change_a_bit(dtype, with_kernels, monkeypatch):
    tensor = gradient(dtype)
    [expected], _ = measure([tensor], 2.0, reproducible=True)
    if not with_kernels:
        monkeypatch.setattr(partial_norms.host, "is_available", lambda: False)
    odd = [
        tensor.t(),
        tensor.repeat_interleave(3, dim=1)[:, ::3],
        tensor.flip(0).t().contiguous(),
        torch.nn.functional.pad(tensor, (5, 5)),
    ]
    for partial in measure(odd, 2.0, reproducible=True)[0]:
        assert partial == expected


def test_plain_measure_without_kernels_is_right(monkeypatch):
    tensors = [gradient(dtype) for dtype in DTYPES]
    expected, _ = measure(tensors, 2.0)
    monkeypatch.setattr(partial_norms.host, "is_available", lambda: False)
    for ours, theirs in zip(measure(tensors, 2.0)[0], expected, strict=True):
        assert ours.value == pytest.approx(theirs.value, rel=1e-14)


@pytest.mark.simnpu
def test_device_shards_are_summed_on_the_host():
    tensor = gradient(torch.float32)
    expected = get_total_norm([tensor, tensor.clone()], reproducible=True).item()

    def rank_main(rank):
        del rank
        partials, copies = measure([tensor.to("npu"), tensor], 2.0, reproducible=True)
        assert copies.d2h == copies.host_syncs == 1
        assert partials[0] == partials[1]
        return get_total_norm([tensor.to("npu"), tensor], reproducible=True).item()

    assert run_ranks(rank_main, 1, backend="hccl") == [expected]


def test_nonfinite_elements_are_told_as_ever():
    tensor = torch.tensor([1.0, math.nan, math.inf])
    assert math.isnan(get_total_norm([tensor], reproducible=True).item())
    with pytest.raises(RuntimeError, match="1 NaN, 1 inf"):
        get_total_norm([tensor], 2.0, error_if_nonfinite=True, reproducible=True)


def test_any_finite_bits_round_correctly():
    for seed in range(20):
        tensor = any_bits(1000, torch.bfloat16, seed, finite=True) * 2.0**-6
        assert_rounds_sqrt(get_total_norm([tensor], reproducible=True), exact_pow_sum([tensor]))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf, 0.0])
def test_other_norm_types_are_refused(norm_type):
    with pytest.raises(ValueError, match="expected norm_type 2 with reproducible=True"):
        get_total_norm([torch.ones(3)], norm_type, reproducible=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_float64_is_refused_on_all_ranks(dtype):
    def rank_main(rank):
        mesh = mesh_of("gloo", (2,), ("fsdp",))
        params = [parameter(torch.ones(4, 4), mesh, [Shard(0)])]
        if rank == 1:
            params.append(parameter(torch.ones(3, dtype=dtype)))
        with pytest.raises(ValueError, match="reproducible") as raised:
            clip_grad_norm_(params, 1.0, reproducible=True)
        return str(raised.value)

    messages = run_ranks(rank_main, 2)
    assert len(set(messages)) == 1
    assert "rank 1: ValueError: expected float32, bfloat16 and float16 gradients" in messages[0]
    assert str(dtype) in messages[0]


def test_ranks_that_do_not_agree_on_it_all_learn_of_it():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2,), ("fsdp",))
        params = [parameter(torch.ones(4, 4), mesh, [Shard(0)])]
        with pytest.raises(ValueError, match="must ask for the same clip") as raised:
            clip_grad_norm_(params, 1.0, reproducible=rank == 1)
        return str(raised.value)

    messages = run_ranks(rank_main, 2)
    assert len(set(messages)) == 1
    assert "reproducible=True" in messages[0]
    assert "reproducible=False" in messages[0]
