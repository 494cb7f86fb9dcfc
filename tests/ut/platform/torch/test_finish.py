"""Rounding to the total norm: exact integers in, one rounding out."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.platform.torch.finish import (
    GRID_EXPONENT,
    LaneTotal,
    clip_coefficient,
    round_norm,
    sum_totals,
)
from tests.reference import assert_rounds_sqrt

GRID = Fraction(2) ** GRID_EXPONENT


def grid(value: Fraction | int) -> LaneTotal:
    count = Fraction(value) / GRID
    assert count.denominator == 1
    return LaneTotal(grid_sum=count.numerator)


@st.composite
def grid_sums(draw: st.DrawFn) -> int:
    """Integers of every length up to float64's whole range, often near a power of two."""
    bits = draw(st.integers(0, 2098))
    return draw(st.integers(0, 1 << 60)) << bits >> 60


@settings(max_examples=400)
@given(grid_sums(), st.sampled_from([torch.float32, torch.float64]))
def test_norm_of_two_is_correctly_rounded(grid_sum, dtype):
    norm = round_norm(LaneTotal(grid_sum=grid_sum), 2.0, dtype)
    pow_sum = grid_sum * GRID
    if norm.isinf():
        largest = torch.finfo(dtype).max
        assert pow_sum > Fraction(largest) ** 2
    else:
        assert_rounds_sqrt(norm, pow_sum)


@given(st.integers(1 << 23, (1 << 24) - 1), st.integers(-60, 60), st.sampled_from([-1, 0, 1]))
def test_norm_of_two_at_the_midpoint_between_floats_goes_to_even(significand, exponent, nudge):
    midpoint = Fraction(2 * significand + 1) * Fraction(2) ** (exponent - 1)
    norm = round_norm(LaneTotal(grid_sum=grid(midpoint**2).grid_sum + nudge), 2.0, torch.float32)
    up = nudge > 0 or (nudge == 0 and significand % 2 == 1)
    assert norm.item() == math.ldexp(significand + up, exponent)


@pytest.mark.parametrize(
    ("values", "p"), [([3.0, 4.0], 3.0), ([1e-30] * 7, 1.5), ([1e30, 2.0], 7.0), ([5.0] * 9, 0.25)]
)
def test_norm_of_any_p_is_within_its_bound_in_float64(values, p):
    total = sum(Fraction(v**p) for v in values)
    norm = round_norm(grid(total), p, torch.float64).item()
    expected = math.exp(math.log(float(total)) / p)
    assert norm == pytest.approx(expected, rel=1e-12)


def test_norm_of_one_and_zero_are_the_rounded_sum():
    third = Fraction(float(1 / 3))
    assert round_norm(grid(third), 1.0, torch.float32).item() == torch.tensor(1 / 3).item()
    assert round_norm(grid(2**40 + 1), 0.0, torch.float64).item() == 2**40 + 1


def test_norm_beyond_float32_is_inf_and_stays_finite_in_float64():
    total = grid(Fraction(10) ** 80)
    assert round_norm(total, 2.0, torch.float32).isinf()
    assert round_norm(total, 2.0, torch.float64).item() == 1e40


def test_nan_beats_inf_beats_numbers():
    assert round_norm(LaneTotal(num_nan=1, num_inf=3), 2.0, torch.float32).isnan()
    assert round_norm(LaneTotal(grid_sum=1, num_inf=1), 2.0, torch.float32).item() == math.inf
    assert round_norm(LaneTotal(extremum=2.0, num_nan=1), math.inf, torch.float32).isnan()


def test_totals_of_nothing_are_the_identity():
    assert round_norm(sum_totals([], 2.0), 2.0, torch.float32).item() == 0.0
    assert round_norm(sum_totals([], math.inf), math.inf, torch.float32).item() == 0.0
    assert round_norm(sum_totals([], -math.inf), -math.inf, torch.float32).item() == math.inf


@pytest.mark.parametrize("max_norm", [0.0, 1e-8, 0.3, 1.0, 4.99999, 5.0, 1e30])
@pytest.mark.parametrize("norm", [0.0, 1e-6, 0.5, 5.0, 5e7, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coefficient_has_the_bits_of_torchs(norm, max_norm, dtype):
    total_norm = torch.tensor(norm, dtype=dtype)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    parameter.grad = torch.ones(1, dtype=dtype)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, total_norm)
    ours = clip_coefficient(total_norm, max_norm).reshape(1)
    torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=0, equal_nan=True)


def test_coefficient_of_unlimited_norm_is_one_even_for_inf_and_nan():
    for norm in (3.0, math.inf, math.nan):
        assert clip_coefficient(torch.tensor(norm), math.inf).item() == 1.0
