"""The device kernels in Triton's interpreter, against exact references."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.kernels import reference
from hyper_parallel.kernels import triton as kernels
from tests.kernels.host_inputs import any_bits, at_offset, normal, subnormal
from tests.kernels.triton_checks import (
    DTYPES,
    ERROR_VOTE,
    HEADER_NUMEL,
    NUM_VOTES,
    SIZES,
    agreed_header,
    amid,
    check_encode,
    check_finish,
    check_huge_votes,
    check_partial_norms,
    check_scale,
    host_lane,
    lane_format,
    lane_of_digits,
)

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("power", [2, 1, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_norms_at_sizes_around_blocks_and_segments(dtype, power):
    tensors = [normal(numel, dtype, seed=numel) for numel in SIZES]
    check_partial_norms(kernels, tensors, power)


@pytest.mark.parametrize("power", [2, 1])
def test_partial_norms_of_mixed_dtypes_in_one_plan(power):
    tensors = [normal(50 + i, DTYPES[i % 3], seed=i) for i in range(9)]
    check_partial_norms(kernels, tensors, power)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25)
@given(
    numel=st.integers(1, 300),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**31),
    finite=st.booleans(),
    power=st.sampled_from([2, 1]),
)
def test_partial_norms_of_any_bits_at_any_address(dtype, numel, offset, seed, finite, power):
    tensor = at_offset(any_bits(numel, dtype, seed, finite=finite), offset)
    check_partial_norms(kernels, [tensor, normal(3, dtype)], power)


@pytest.mark.parametrize("value", [1e20, -1e-25, 3e38, 2.0**-149, 1e-40, 1.0 + 2.0**-23])
def test_partial_norms_of_constants_across_the_whole_range(value):
    check_partial_norms(kernels, [torch.full((5000,), value), torch.tensor([value])], 2)


@pytest.mark.parametrize("spike", [30.0, 300.0, 1e3, 1e4, 1e6])
def test_a_spike_does_not_cost_the_bits_of_the_rest(spike):
    tensor = normal(8192, torch.float32)
    tensor[77] = spike
    check_partial_norms(kernels, [tensor], 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormals_count(dtype):
    check_partial_norms(kernels, [subnormal(1000, dtype, seed=3)], 2)
    check_partial_norms(kernels, [subnormal(1000, dtype, seed=4)], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_nonfinite_elements_are_counted_wherever_they_are(place, special, dtype):
    tensor = normal(10_000, dtype)
    tensor[place] = special
    check_partial_norms(kernels, [normal(10, dtype), tensor], 2)


def test_nan_beyond_the_tail_is_not_read():
    check_partial_norms(
        kernels, [amid(math.nan, normal(n, torch.float32), 3) for n in (5, 5000)], 2
    )


def test_sum_at_512_mi_elements_is_right():
    """512 segments of a million elements, of which the interpreter runs each distinct one."""
    tensor = normal(1 << 16, torch.float32)
    launcher = kernels.Launcher([tensor], [0], tensor.device)
    repeats = (512 << 20) // tensor.numel()
    rows = launcher.partial_norms([tensor], 2).repeat(repeats, 1)
    [measured] = kernels.totals_of_ranges(rows, [(0, len(rows))], 2).values
    exact = sum((Fraction(x) ** 2 for x in tensor.tolist()), Fraction(0)) * repeats
    assert abs(Fraction(measured) / exact - 1) < Fraction(1, 2**45)


@pytest.mark.parametrize("power", [2, 1])
@pytest.mark.parametrize("digit_bits", [23, 17, 11, 10])
def test_encode_adds_exact_digits_to_what_the_host_encoded(digit_bits, power):
    lanes = [
        [normal(3000, torch.float32), normal(70, torch.bfloat16, seed=1)],
        [torch.full((100,), 1e20), torch.full((3,), 1e-25), normal(5, torch.float16)],
        [torch.full((9,), 2.0**-149)],
    ]
    incoming = [host_lane(v, digit_bits) for v in (1.0 / 3, 1e300, 2.0**-1074, 0.0)]
    check_encode(kernels, lanes, power, digit_bits, incoming)


@pytest.mark.parametrize("digit_bits", [23, 17])
def test_encode_leaves_lanes_without_device_tensors_as_they_are(digit_bits):
    lanes = [[torch.empty(0)], [normal(10, torch.float32)]]
    incoming = [host_lane(v, digit_bits) for v in (0.1, 2.0, 7.5)]
    check_encode(kernels, lanes, 2, digit_bits, incoming)


def test_encode_adds_up_more_rows_than_it_takes_at_a_time():
    tensors = [torch.full((2,), 1.0 + i / 1000) for i in range(1100)]
    check_encode(kernels, [tensors], 2, 23, [host_lane(0.7, 23), host_lane(0.0, 23)])


def test_encode_counts_nan_and_inf_and_votes():
    bad = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    incoming = [host_lane(1.0, 17, 2, 1), host_lane(1.0, 17), host_lane(0.0, 17)]
    votes = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, *(float(i) for i in range(16))]
    check_encode(kernels, [[bad], [normal(5, torch.float32)]], 2, 17, incoming, votes)
    fine = [[torch.full((9,), 1e30)], [normal(5, torch.float32)]]
    check_encode(kernels, fine, 2, 17, incoming, votes)


def test_encode_votes_for_huge_elements_and_for_no_others():
    check_huge_votes(kernels)


@pytest.mark.parametrize("digit_bits", [23, 17, 10])
def test_encode_adds_up_as_many_rows_as_a_lane_may_have(digit_bits):
    """Each thousand of them adds to the same digit, and as much as there is below the next."""
    unit = next(e for e in range(-60, 0) if (e - reference.GRID_EXPONENT) % digit_bits == 0)
    launcher = kernels.Launcher([], [], torch.device("cpu"))
    launcher._rows = torch.zeros(kernels.MAX_ROWS_PER_LANE, kernels.ROW_NUMEL)
    launcher._rows[::1024, 1] = (2.0**digit_bits - 1.0) * 2.0**unit
    launcher.plan.num_rows = kernels.MAX_ROWS_PER_LANE
    form = lane_format(kernels, 2, digit_bits)
    arrived = torch.zeros(form.header_numel + form.lane_numel)
    outgoing = torch.empty_like(arrived)
    table = kernels.LaneTable([(0, kernels.MAX_ROWS_PER_LANE)], [], torch.device("cpu"))
    launcher.encode(arrived, outgoing, table, form)
    decoded = reference.decode_lane(outgoing[form.header_numel :].tolist(), digit_bits)
    assert decoded == sum(map(Fraction, launcher._rows[:, 1].tolist()))


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_encode_takes_maxima(bad):
    first = normal(5000, torch.float32)
    if bad is not None:
        first[4567] = bad
    incoming = [host_lane(value, 17, 0, 1, math.inf) for value in (0.5, 100.0, 2.0**127)]
    check_encode(kernels, [[first], [normal(5, torch.bfloat16)]], 0, 17, incoming)


def reduced_lane(values: list[float], digit_bits: int) -> list[float]:
    """Return the sum of lanes as an all-reduce leaves it."""
    lanes = [host_lane(value, digit_bits) for value in values]
    return [sum(column) for column in zip(*lanes, strict=True)]


@pytest.mark.parametrize("power", [2, 1])
@pytest.mark.parametrize("digit_bits", [23, 17, 10])
@settings(max_examples=15)
@given(data=st.data())
def test_finish_rounds_the_norm_once(power, digit_bits, data):
    exponent = data.draw(st.integers(-200, 240) if power == 2 else st.integers(-80, 120))
    values = [
        math.ldexp(data.draw(st.floats(0.5, 1.0)), exponent + data.draw(st.integers(-40, 0)))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    lanes = [reduced_lane([value, value / 3], digit_bits) for value in values]
    check_finish(kernels, lanes, power, digit_bits, 1.0)


@pytest.mark.parametrize("power", [2, 1])
def test_finish_of_special_lanes(power):
    for max_norm in (0.0, 1.0, 1e30, 1e39, math.inf):
        check_finish(kernels, [host_lane(0.0, 17)], power, 17, max_norm)
        check_finish(kernels, [host_lane(2.0, 17), host_lane(0.0, 17, 0, 1)], power, 17, max_norm)
        check_finish(kernels, [host_lane(2.0, 17, 1, 1)], power, 17, max_norm)
        check_finish(kernels, [host_lane(1e300, 17)], power, 17, max_norm)
        check_finish(kernels, [], power, 17, max_norm)
    poisoned = [math.nan, 0.0, *host_lane(2.0, 17)[2:]]
    check_finish(kernels, [poisoned], power, 17, 1.0)


@pytest.mark.parametrize("power", [2, 1])
def test_finish_of_balanced_digits(power):
    """Digits of devices may be negative, and the leading one may count for half."""
    lane = lane_of_digits(17, {64: 1.0, 63: -(2.0**16) - 255.0, 62: -(2.0**16)})
    check_finish(kernels, [lane, lane, host_lane(3.0, 17)], power, 17, 1.0)


@pytest.mark.parametrize("power", [2, 1, 0])
def test_finish_without_proof_of_agreement_leaves_gradients_alone(power):
    lanes = [host_lane(2.0, 17) if power else [0.0, 0.0, 2.0, *[0.0] * 122]]
    for place in range(HEADER_NUMEL):
        for value in (0.0, 1e9, math.nan):
            header = agreed_header(power, 17)
            header[place] = value
            is_vote = 0 < place <= NUM_VOTES and place != ERROR_VOTE and not math.isnan(value)
            is_agreed = is_vote or (place == ERROR_VOTE and value == 0.0)
            for max_norm in (1.0, math.inf):
                check_finish(
                    kernels, lanes, power, 17, max_norm, header=header, is_agreed=is_agreed
                )


def test_finish_of_maxima():
    for value in (0.0, 5.5, 3e38, 1e-40):
        lane = host_lane(value, 17, norm_type=math.inf)
        check_finish(kernels, [lane, [0.0] * len(lane)], 0, 17, 1.0)
        check_finish(kernels, [[0.0, 1.0, *lane[2:]]], 0, 17, 1.0)
        check_finish(kernels, [[1.0, 1.0, *lane[2:]]], 0, 17, 1.0)


def test_finish_rounds_ties_and_near_ties_to_nearest():
    """Norms a hair above and below the middle of two float32 numbers: a hair is 2^-20 ulp."""
    for bits in (0x3F800000, 0x3F800001, 0x40490FDB, 0x3FFFFFFF):
        low = Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])
        middle = low + Fraction(1, 2**24) * (2 if low >= 2 else 1)
        for hair in (-(2.0**-43), 2.0**-43):
            value = float(middle**2 * (1 + Fraction(hair)))
            check_finish(kernels, [host_lane(value, 17)], 2, 17, 1.0)


@pytest.mark.parametrize("power", [2, 1])
@settings(max_examples=60)
@given(data=st.data())
def test_finish_rounds_subnormal_norms_once(power, data):
    """Around multiples and halves of 2^-149, of which the last bits of a sum say on what side."""
    halves = data.draw(st.integers(0, 2**25)) >> data.draw(st.integers(0, 24))
    hair = data.draw(st.sampled_from([0, 1, -1])) * data.draw(st.sampled_from([2.0**-25, 2.0**-14]))
    exact = (Fraction(halves) * Fraction(1, 2**150)) ** power * (1 + Fraction(hair))
    check_finish(kernels, [host_lane(float(exact), 17)], power, 17, 1.0)


@pytest.mark.parametrize("coefficient", [0.3, 1.0, 0.0, 2.0**-140, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_rounds_once_and_touches_nothing_else(dtype, coefficient):
    tensors = [amid(7.0, normal(numel, dtype, seed=numel), numel % 5) for numel in SIZES]
    tensors.append(amid(7.0, any_bits(500, dtype, 9, finite=False), 3))
    check_scale(kernels, tensors, coefficient)


def test_scale_by_one_does_not_even_read():
    """A signalling NaN, which any arithmetic would make quiet, keeps its bits."""
    signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    factor = torch.ones(1)
    kernels.Launcher([signalling], [0], signalling.device).scale_([signalling], factor)
    assert signalling.view(torch.int32).item() == 0x7F800001


def test_kernels_take_tensors_in_the_place_of_those_planned():
    tensors = [normal(100, torch.float32), normal(50, torch.bfloat16)]
    launcher = kernels.Launcher(tensors, [0, 1], tensors[0].device)
    assert launcher.plan.fits(tensors, [0, 1])
    assert not launcher.plan.fits(tensors, [1, 0])
    assert not launcher.plan.fits([tensor.clone() for tensor in tensors], [0, 1])


def test_plan_refuses_what_there_are_no_kernels_for():
    with pytest.raises(ValueError, match="float64"):
        kernels.Launcher([torch.zeros(3, dtype=torch.float64)], [0], torch.device("cpu"))
