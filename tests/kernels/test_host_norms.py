"""Norms of host tensors against exact references, at any size, address and bit pattern."""

import math
from array import array
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.kernels import host
from hyper_parallel.kernels.host.library import TensorTable
from tests.kernels.host_inputs import (
    CHUNK_SIZES,
    DTYPES,
    INSTRUCTION_SETS,
    SIZES,
    any_bits,
    at_offset,
    normal,
    running,
    subnormal,
)
from tests.reference import exact_pow_sum

PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def measured(tensor, norm_type=2.0):
    """Return (sum of squares, max, power sum, min, nonzeros, NaN, inf) of one tensor."""
    norms = host.partial_norms([tensor], norm_type)
    columns = (
        norms.sums_of_squares,
        norms.max_abs,
        norms.pow_sums,
        norms.min_abs,
        norms.num_nonzero,
        norms.num_nan,
        norms.num_inf,
    )
    return tuple(column[0] for column in columns)


def assert_squares_match(tensor):
    total, largest, *_, num_nan, num_inf = measured(tensor)
    assert num_nan == int(tensor.isnan().sum())
    assert num_inf == int(tensor.isinf().sum())
    if num_nan or num_inf:
        assert math.isnan(total) == math.isnan(largest) == bool(num_nan)
        assert num_nan or math.isinf(total)
        return
    assert largest == (tensor.double().abs().max().item() if tensor.numel() else 0.0)
    exact = exact_pow_sum([tensor])
    if exact >= Fraction(2) ** 1024:
        assert total == math.inf
        return
    # One rounding per addition to a lane, three in the tree of lanes, one per square of a float64;
    # the last term is for squares below float64's range.
    bound = (
        exact * Fraction(tensor.numel() // 32 + 8, 2**53) + tensor.numel() * Fraction(2) ** -1074
    )
    assert abs(Fraction(total) - exact) <= bound


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_sum_of_squares_at_sizes_around_vector_widths(numel, dtype, isa):
    with running(isa):
        assert_squares_match(normal(numel, dtype))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=40)
@given(
    numel=st.integers(0, 300),
    offset=st.integers(0, 33),
    seed=st.integers(0, 2**31),
    finite=st.booleans(),
)
def test_sum_of_squares_of_any_bits_at_any_address(dtype, isa, numel, offset, seed, finite):
    with running(isa):
        assert_squares_match(at_offset(any_bits(numel, dtype, seed, finite=finite), offset))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", CHUNK_SIZES)
def test_sum_of_squares_at_sizes_around_chunks(numel, dtype):
    with running(num_threads=3):
        assert_squares_match(normal(numel, dtype))


def test_addresses_need_not_even_be_multiples_of_the_element():
    for dtype in DTYPES:
        tensor = normal(100, dtype)
        raw = bytearray(3 + tensor.nbytes)
        raw[3:] = bytes(tensor.view(torch.uint8).tolist())
        whole = torch.frombuffer(raw, dtype=torch.uint8)
        table = TensorTable(
            array("Q", [whole.data_ptr() + 3]), array("q", [100]), _format_of(tensor)
        )
        results = bytearray(56)
        host.load().partial_norms(table, 2.0, 1, results)
        assert host.HostNorms(results).sums_of_squares == [measured(tensor)[0]]


def _format_of(tensor):
    return host.pack([tensor]).formats


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [1.0, 3.0, 4.0, 0.5, 2.5, 63.0, 64.0, 65.0])
def test_power_sum_matches_fsum(p, dtype, isa):
    tensor = normal(1003, dtype)
    with running(isa):
        power_sum = measured(tensor, p)[2]
    expected = math.fsum(abs(x) ** p for x in tensor.double().tolist())
    assert power_sum == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_smallest_magnitude_and_nonzeros(numel, dtype, isa):
    tensor = normal(numel, dtype)
    tensor[1::3] = 0.0
    tensor[2::6] = -0.0
    with running(isa):
        assert measured(tensor, 0.0)[4] == int(tensor.count_nonzero())
        assert measured(tensor, -math.inf)[3] == (
            tensor.double().abs().min().item() if numel else math.inf
        )
        nonzero = normal(numel, dtype).abs() + 0.5
        assert measured(nonzero, -math.inf)[3] == (
            nonzero.double().min().item() if numel else math.inf
        )


def test_nan_reaches_every_norm_that_it_must():
    tensor = torch.tensor([1.0, math.nan, -math.inf, 0.0])
    for p in (2.0, 3.0, math.inf, -math.inf, 0.0):
        total, largest, power_sum, smallest, num_nonzero, num_nan, num_inf = measured(tensor, p)
        assert math.isnan(total)
        assert math.isnan(largest)
        assert (num_nan, num_inf) == (1, 1)
        if p == 3.0:
            assert math.isnan(power_sum)
        if p == -math.inf:
            assert math.isnan(smallest)
        if p == 0.0:
            assert num_nonzero == 3


def test_nan_in_a_late_chunk_is_not_lost_to_larger_numbers():
    tensor = torch.full((400_000,), 3e38)
    tensor[390_000] = math.nan
    assert math.isnan(measured(tensor)[1])


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormals_count_even_where_torch_flushes_them(dtype, isa, flush):
    tensor = subnormal(1000, dtype, seed=7)
    with running(isa, num_threads=2):
        expected = measured(tensor, 1.0)
        exact = exact_pow_sum([tensor], 1)
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor cannot flush subnormals")
        try:
            flushed = measured(tensor, 1.0)
            still_flushing = (torch.tensor(1e-310, dtype=torch.float64) * 1.0).item() == 0.0
        finally:
            torch.set_flush_denormal(False)
    assert flushed == expected
    assert Fraction(flushed[2]) == pytest.approx(exact, rel=1e-13)
    assert still_flushing == flush


def test_tensors_are_measured_apart_in_one_call():
    tensors = [normal(numel, dtype, seed=numel) for dtype in DTYPES for numel in SIZES]
    with running(num_threads=4):
        together = host.partial_norms(tensors, 2.0)
        apart = [measured(tensor) for tensor in tensors]
    assert together.sums_of_squares == [row[0] for row in apart]
    assert together.max_abs == [row[1] for row in apart]


@pytest.mark.parametrize("dtype", list(PARTS), ids=str)
def test_complex_numbers_are_pairs(dtype):
    tensor = torch.randn(777, dtype=dtype)
    assert measured(tensor) == measured(torch.view_as_real(tensor).flatten())


def test_no_tensors_and_only_empty_tensors_cost_nothing():
    assert host.partial_norms([], 2.0).sums_of_squares == []
    assert host.partial_norms([torch.empty(0), torch.empty(3, 0)], 2.0).max_abs == [0.0, 0.0]
    assert measured(torch.empty(0), -math.inf)[3] == math.inf
    assert list(host.exact_sums_of_squares([])) == []
    host.scale_([], 0.5)


def test_sum_of_many_chunks_is_as_right_as_of_one():
    """Chunk sums are added with compensation: 256 of them, each of the same rounded value."""
    tensor = torch.full((1 << 24,), 0.1)
    exact = Fraction(tensor[0].item()) ** 2 * tensor.numel()
    assert abs(Fraction(measured(tensor)[0]) / exact - 1) < Fraction(1, 2**42)
