"""Exact sums of squares: every bit right, whatever the window guessed, order or sharding."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.kernels import host
from hyper_parallel.platform.torch.exact_fallback import exact_sum_of_squares
from tests.kernels.host_inputs import (
    CHUNK_SIZES,
    EXACT_DTYPES,
    INSTRUCTION_SETS,
    any_bits,
    at_offset,
    normal,
    running,
    subnormal,
)
from tests.reference import exact_pow_sum

GRID = Fraction(2) ** host.EXACT_EXPONENT


def only(sums):
    [one] = sums
    return one


def integer_sum(tensor):
    """Return the sum of squares in grid units, from the elements' own integers."""
    total = 0
    for value in tensor.double().tolist():
        numerator, denominator = value.as_integer_ratio()
        total += numerator**2 << 298 - 2 * (denominator.bit_length() - 1)
    return total


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@settings(deadline=None, max_examples=60)
@given(numel=st.integers(0, 300), offset=st.integers(0, 33), seed=st.integers(0, 2**31))
def test_any_finite_bits_are_summed_exactly(dtype, isa, numel, offset, seed):
    tensor = at_offset(any_bits(numel, dtype, seed, finite=True), offset)
    with running(isa):
        [ours] = host.exact_sums_of_squares([tensor])
    assert ours == host.ExactSum(integer_sum(tensor), 0, 0)
    assert ours.units * GRID == exact_pow_sum([tensor])


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize("numel", CHUNK_SIZES)
def test_sizes_around_chunks_and_flushes(numel, dtype):
    tensor = normal(numel, dtype)
    with running(num_threads=3):
        [ours] = host.exact_sums_of_squares([tensor])
    assert ours.units == integer_sum(tensor)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_largest_numbers_fill_every_lane_without_overflow(dtype):
    """An accumulator is flushed before its sum can leave its binade."""
    tensor = torch.full((100_003,), torch.finfo(dtype).max, dtype=dtype)
    [ours] = host.exact_sums_of_squares([tensor])
    assert ours.units == integer_sum(tensor[:1]) * tensor.numel()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_windows_that_grow_shrink_and_fail_keep_every_bit(dtype, isa):
    """Chunks of 16 Ki elements whose ranges have nothing to do with each other."""
    pieces = [
        normal(16384, dtype, seed=1),
        torch.zeros(16384, dtype=dtype),
        subnormal(16384, dtype, seed=2),
        any_bits(16384, dtype, seed=3, finite=True),
        *(normal(16384, dtype, seed=4 + i) * 2.0**-10 for i in range(8)),
        torch.full((16384,), torch.finfo(dtype).max, dtype=dtype),
        normal(100, dtype, seed=20),
    ]
    tensor = torch.cat(pieces)
    with running(isa, num_threads=2):
        [ours] = host.exact_sums_of_squares([tensor])
    assert ours.units == sum(map(integer_sum, pieces))


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_order_and_sharding_do_not_change_a_bit(dtype):
    tensor = normal(300_001, dtype) * torch.exp2(torch.arange(300_001) % 30 - 20).to(dtype)
    generator = torch.Generator().manual_seed(5)
    permuted = tensor[torch.randperm(tensor.numel(), generator=generator)]
    with running(num_threads=4):
        [whole] = host.exact_sums_of_squares([tensor])
        shards = host.exact_sums_of_squares(permuted.split(77_777))
        tiny = host.exact_sums_of_squares(tensor.split(1001))
    assert whole.units == sum(s.units for s in shards) == sum(s.units for s in tiny)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_nonfinite_elements_are_counted_and_leave_no_sum(dtype):
    tensor = normal(50_000, dtype)
    tensor[3] = math.nan
    tensor[20_000] = math.inf
    tensor[49_999] = -math.inf
    fine = normal(10, dtype)
    poisoned, unharmed = host.exact_sums_of_squares([tensor, fine])
    assert poisoned == host.ExactSum(0, 1, 2)
    assert unharmed.units == integer_sum(fine)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_subnormals_count_even_where_torch_flushes_them(dtype):
    tensor = subnormal(1000, dtype, seed=9)
    expected = integer_sum(tensor)
    torch.set_flush_denormal(True)
    try:
        [ours] = host.exact_sums_of_squares([tensor])
        fallback = exact_sum_of_squares(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert ours.units == fallback.units == expected


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@settings(deadline=None, max_examples=30)
@given(numel=st.integers(0, 100), seed=st.integers(0, 2**31), finite=st.booleans())
def test_fallback_agrees_with_the_kernels(dtype, numel, seed, finite):
    tensor = any_bits(numel, dtype, seed, finite=finite)
    assert exact_sum_of_squares(tensor) == only(host.exact_sums_of_squares([tensor]))


def test_complex_numbers_are_pairs():
    tensor = torch.randn(777, dtype=torch.complex64)
    parts = torch.view_as_real(tensor).flatten()
    assert only(host.exact_sums_of_squares([tensor])) == only(host.exact_sums_of_squares([parts]))
    assert exact_sum_of_squares(tensor) == only(host.exact_sums_of_squares([tensor]))
