"""The wire format is exact: any float64 values, any number of ranks, any order of addition."""

import dataclasses
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.platform.torch.finish import GRID_EXPONENT
from hyper_parallel.platform.torch.wire_format import (
    PartialNorm,
    PartialNorms,
    Votes,
    WireFormat,
    fingerprint,
)

GRID = Fraction(2) ** GRID_EXPONENT
finite = st.floats(min_value=0.0, allow_infinity=False, allow_nan=False, allow_subnormal=True)
group_sizes = st.sampled_from([2, 3, 5, 8, 31, 128, 129, 1000, 4096, 8191, 8192])


def reduce_in_any_order(buffers: list[torch.Tensor], rng: random.Random) -> torch.Tensor:
    """Add float32 buffers two at a time, as some ring or tree or switch might."""
    buffers = list(buffers)
    while len(buffers) > 1:
        left = buffers.pop(rng.randrange(len(buffers)))
        right = buffers.pop(rng.randrange(len(buffers)))
        buffers.append(left + right)
    return buffers[0]


def as_tensor(lane) -> torch.Tensor:
    return torch.tensor(lane, dtype=torch.float32)


@settings(max_examples=300)
@given(st.lists(finite, min_size=1, max_size=12), group_sizes, st.randoms(use_true_random=False))
def test_sum_over_ranks_is_exact(values, group_size, rng):
    values = values[:group_size]
    wire = WireFormat(group_size, 2.0)
    lanes = [as_tensor(wire.encode(PartialNorm(value))) for value in values]
    reduced = wire.decode(reduce_in_any_order(lanes, rng).tolist())
    assert reduced.grid_sum * GRID == sum(Fraction(value) for value in values)


@settings(max_examples=60)
@given(finite, group_sizes)
def test_sum_is_exact_when_every_rank_fills_every_digit(value, group_size):
    """The worst case for float32: all ranks contribute to the same digits."""
    for contribution in (value, 1.7976931348623157e308, 2.0**1023, 5e-324, 1.0 - 2.0**-53):
        wire = WireFormat(group_size, 2.0)
        lane = as_tensor(wire.encode(PartialNorm(contribution)))
        reduced = lane.repeat(group_size, 1).cumsum(0, dtype=torch.float32)[-1]
        assert wire.decode(reduced.tolist()).grid_sum * GRID == group_size * Fraction(contribution)
    most = torch.full((wire.lane_numel,), float((1 << wire.digit_bits) - 1))
    total = most.repeat(group_size, 1).cumsum(0, dtype=torch.float32)[-1]
    assert total.tolist() == [group_size * most[0].item()] * wire.lane_numel


@given(st.lists(finite, max_size=20))
def test_combine_within_a_rank_rounds_once(values):
    wire = WireFormat(8, 3.0)
    combined = wire.combine([PartialNorm(value) for value in values])
    exact = sum((Fraction(value) for value in values), Fraction(0))
    try:
        assert combined == PartialNorm(float(exact))
    except OverflowError:
        assert combined == PartialNorm(0.0, overflows=True)


@pytest.mark.parametrize(("group_size", "floats"), [(2, 92), (128, 124), (8192, 191)])
def test_lane_is_as_small_as_the_design_says(group_size, floats):
    assert WireFormat(group_size, 2.0).lane_numel == 2 + floats


def test_buffers_of_all_norm_types_have_one_size():
    sizes = {
        len(WireFormat(64, p).pack(Votes(), 7, [None, PartialNorm(1.0)]))
        for p in (0.0, 0.5, 1.0, 2.0, math.inf, -math.inf)
    }
    assert len(sizes) == 1


def test_counts_saturate_instead_of_losing_exactness():
    wire = WireFormat(8192, 2.0)
    lane = as_tensor(wire.encode(PartialNorm(0.0, num_nan=10**9, num_inf=10**12)))
    total = wire.decode((lane * 8192).tolist())
    assert total.num_nan == total.num_inf == 8192 * (2**wire.digit_bits - 1)


@given(st.lists(st.one_of(st.none(), st.floats(0, 2.0**127, width=32)), min_size=1, max_size=9))
@pytest.mark.parametrize("norm_type", [math.inf, -math.inf])
def test_extrema_of_float32_are_exact(norm_type, values):
    wire = WireFormat(len(values), norm_type)
    lanes = [as_tensor(wire.encode(None if v is None else PartialNorm(v))) for v in values]
    total = wire.decode(torch.stack(lanes).amax(0).tolist())
    present = [value for value in values if value is not None]
    expected = max(present, default=0.0) if norm_type > 0 else min(present, default=math.inf)
    assert total.extremum == expected


@pytest.mark.parametrize("norm_type", [2.0, math.inf, -math.inf])
def test_nan_on_one_rank_survives_every_reduce(norm_type):
    wire = WireFormat(4, norm_type)
    lanes = [wire.encode(PartialNorm(1.0)), wire.encode(PartialNorm(0.0, num_nan=2))]
    stacked = torch.stack([as_tensor(lane) for lane in lanes])
    reduced = stacked.sum(0) if wire.op == "sum" else stacked.amax(0)
    assert wire.decode(reduced.tolist()).num_nan > 0
    assert not reduced.isnan().any(), "a NaN on the wire is dropped by some backends' MAX"


votes = st.builds(Votes, *[st.booleans()] * len(dataclasses.fields(Votes)))


@given(st.lists(votes, min_size=2, max_size=9), st.sampled_from([2.0, math.inf]), st.integers(0))
def test_votes_are_or_ed_over_ranks(ballots, norm_type, seed):
    wire = WireFormat(len(ballots), norm_type)
    stamp = fingerprint(float(seed % 97))
    headers = torch.stack([as_tensor(wire.pack(ballot, stamp, [])) for ballot in ballots])
    reduced = headers.sum(0) if wire.op == "sum" else headers.amax(0)
    assert wire.decode_header(reduced.tolist(), stamp) == Votes(
        *(any(column) for column in zip(*(vars(b).values() for b in ballots), strict=True))
    )


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from([2.0, 1.0, math.inf, -math.inf]), st.integers(0, 2)),
        min_size=2,
        max_size=9,
    ),
    st.randoms(use_true_random=False),
)
def test_every_rank_sees_that_another_asked_for_something_else(asked, rng):
    """Ranks with different norm types even reduce with different operators, each its own."""
    size = len(asked)
    wires = [WireFormat(size, norm_type) for norm_type, _ in asked]
    stamps = [fingerprint(norm_type, float(max_norm)) for norm_type, max_norm in asked]
    frozen = rng.choice([None, rng.randrange(size)])
    packed = [
        as_tensor(wires[i].pack(Votes(frozen=i == frozen), stamps[i], [])) for i in range(size)
    ]
    order = rng.sample(range(size), size)
    reduced = packed[order[0]]
    for i in order[1:]:
        reduced = reduced + packed[i] if wires[i].op == "sum" else torch.maximum(reduced, packed[i])
    answers = [w.decode_header(reduced.tolist(), s) for w, s in zip(wires, stamps, strict=True)]
    if frozen is not None:
        assert answers == [Votes(frozen=True)] * size
    elif len(set(asked)) == 1:
        assert answers == [Votes()] * size
    else:
        assert answers == [None] * size


@pytest.mark.parametrize("group_size", [0, (1 << 20) + 1])
def test_impossible_group_size_is_refused(group_size):
    with pytest.raises(ValueError, match=str(group_size)):
        WireFormat(group_size, 2.0)


ROWS = [
    PartialNorm(1.5),
    PartialNorm(0.0, num_nan=2),
    PartialNorm(4.0),
    PartialNorm(0.0, num_inf=1),
    PartialNorm(0.0, overflows=True),
    PartialNorm(3.0, grid_sum=3 << -GRID_EXPONENT),
]


@pytest.mark.parametrize("indices", [range(6), [0, 2], [5, 0], [3, 1, 2], []])
def test_columns_of_partial_norms_hold_what_rows_do(indices):
    columns = PartialNorms.of(ROWS).select(indices)
    rows = [ROWS[i] for i in indices]
    assert list(columns) == rows
    assert columns == rows
    assert list(columns[1:]) == rows[1:]
    wire = WireFormat(4, 2.0)
    assert wire.combine(columns) == wire.combine(iter(rows))


def test_only_partial_norms_that_are_more_than_a_value_are_kept_apart():
    assert set(PartialNorms.of(ROWS).others) == {1, 3, 4, 5}
    assert PartialNorms.of(ROWS)[-1] == ROWS[-1]
