"""Lanes encoded with torch operators hold exactly what `WireFormat` would have put there."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.platform.torch.device_lanes import encode, to_lanes
from hyper_parallel.platform.torch.wire_format import PartialNorm, WireFormat

SIZES = [1, 2, 3, 8, 128, 1000, 8192, 1 << 20]
sizes = pytest.mark.parametrize("size", SIZES)
sums = st.floats(0.0, allow_infinity=False, allow_nan=False)
EDGES = [
    0.0, 5e-324, 2.0**-1022, math.nextafter(2.0**-1022, 0), 1.0, math.nextafter(1, 2), 2.0**53 - 1,
    1.7976931348623157e308, 1.0 / 3, 2.0**-1074 * 3,
]  # fmt: skip


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@sizes
@pytest.mark.parametrize("value", EDGES)
def test_one_value_has_the_digits_of_the_host(size, value):
    wire = WireFormat(size, 2.0)
    assert encode(tensor([value]), wire)[0].tolist() == list(wire.encode(PartialNorm(value)))


@given(st.lists(sums, min_size=1, max_size=20), st.sampled_from(SIZES))
def test_values_have_the_digits_of_the_host(values, size):
    wire = WireFormat(size, 2.0)
    expected = [list(wire.encode(PartialNorm(value))) for value in values]
    assert encode(tensor(values), wire).tolist() == expected


@given(
    st.lists(st.floats(0.0, 1e300, allow_subnormal=True), min_size=1, max_size=300),
    st.sampled_from(SIZES),
)
def test_sums_are_exact_and_small_enough_for_all_ranks(values, size):
    wire = WireFormat(size, 2.0)
    lane = to_lanes(encode(tensor(values), wire).sum(0, keepdim=True), len(values), wire)[0]
    assert lane.dtype == torch.float32
    assert lane.max().item() * size <= 2**24
    total = wire.decode(lane.tolist())
    assert Fraction(total.grid_sum) * Fraction(2) ** -1074 == sum(map(Fraction, values))


def test_many_equal_values_with_all_bits_set():
    """The most that digits can carry."""
    for size in (8, 8192):
        wire = WireFormat(size, 2.0)
        value, num = 2.0**53 - 1, 5000
        lane = to_lanes(
            encode(tensor([value] * num), wire).sum(0, keepdim=True), num, wire
        )[0]  # fmt: skip
        assert lane.max().item() * size <= 2**24
        grid_sum = wire.decode(lane.tolist()).grid_sum
        assert grid_sum == num * int(value) << 1074


def test_infinity_and_nan_are_counted_and_leave_the_digits():
    wire = WireFormat(8, 2.0)
    rows = encode(tensor([math.nan, 2.0, math.inf, math.nan]), wire)
    total = wire.decode(to_lanes(rows.sum(0, keepdim=True), 4, wire)[0].tolist())
    assert (total.num_nan, total.num_inf, total.grid_sum) == (2, 1, 2 << 1074)


def test_counts_stay_small_enough_for_all_ranks():
    wire = WireFormat(1 << 20, 2.0)
    rows = encode(tensor([math.nan] * 1000), wire).sum(0, keepdim=True)
    assert to_lanes(rows, 1000, wire)[0, 0].item() == 15
