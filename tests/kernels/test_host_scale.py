"""Scaling in place: one rounding, every bit pattern, and not a byte beside the tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.kernels import host
from tests.kernels.host_inputs import (
    DTYPES,
    INSTRUCTION_SETS,
    SIZES,
    any_bits,
    at_offset,
    bits_of,
    normal,
    running,
    subnormal,
)

FACTORS = [0.3, 1.0, 2.0, -0.7, 0.0, 1e-6, 1e5, 2.0**-140, math.inf, math.nan]


def expected_of(tensor, factor):
    """Scale in float32 (float64 for float64) and round once."""
    if tensor.dtype == torch.float64:
        return tensor * factor
    return (tensor.float() * torch.tensor(factor, dtype=torch.float32)).to(tensor.dtype)


def assert_same(ours, expected):
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(bits_of(ours)[~nan], bits_of(expected)[~nan])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_is_scaled_and_rounded_once(dtype, factor, isa):
    tensor = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    ours = tensor.clone()
    with running(isa):
        host.scale_([ours], factor)
    assert_same(ours, expected_of(tensor, factor))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=40)
@given(
    numel=st.integers(0, 200),
    offset=st.integers(0, 33),
    seed=st.integers(0, 2**31),
    factor=st.sampled_from(FACTORS),
)
def test_any_bits_at_any_address(dtype, isa, numel, offset, seed, factor):
    tensor = at_offset(any_bits(numel, dtype, seed, finite=False), offset)
    expected = expected_of(tensor, factor)
    with running(isa):
        host.scale_([tensor], factor)
    assert_same(tensor, expected)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_bytes_beside_the_tensor_are_left_alone(numel, dtype, isa):
    around = any_bits(numel + 80, dtype, seed=numel, finite=False)
    before = bits_of(around).clone()
    with running(isa):
        host.scale_([around[40 : 40 + numel]], 0.3)
    after = bits_of(around)
    assert torch.equal(after[:40], before[:40])
    assert torch.equal(after[40 + numel :], before[40 + numel :])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_results_are_kept_even_where_torch_flushes_them(dtype, isa):
    tensor = torch.cat([subnormal(500, dtype, seed=1), subnormal(500, dtype, seed=2) * 3])
    expected = expected_of(tensor, 0.3)
    assert expected.count_nonzero() > 900
    torch.set_flush_denormal(True)
    try:
        with running(isa, num_threads=2):
            host.scale_([tensor], 0.3)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits_of(tensor), bits_of(expected))


def test_large_and_small_tensors_of_all_dtypes_in_one_call():
    tensors = [normal(numel, dtype) for dtype in DTYPES for numel in (5, 200_001, 0, 70_000)]
    expected = [expected_of(tensor, 0.3) for tensor in tensors]
    with running(num_threads=3):
        host.scale_(tensors, 0.3)
    assert all(map(torch.equal, tensors, expected))


def test_complex_numbers_are_pairs():
    tensor = torch.randn(777, dtype=torch.complex64)
    expected = torch.view_as_real(tensor).clone() * torch.tensor(0.3)
    host.scale_([tensor], 0.3)
    assert torch.equal(torch.view_as_real(tensor), expected)


def test_autograd_learns_of_the_change():
    """A tensor saved for backward that is changed in place must be noticed as ever."""
    tensor = torch.ones(4)
    before = tensor._version
    host.scale_([tensor], 0.5)
    assert tensor._version > before
    with torch.inference_mode():
        inference = torch.ones(4)
        host.scale_([inference], 0.5)
    assert inference.tolist() == [0.5] * 4
