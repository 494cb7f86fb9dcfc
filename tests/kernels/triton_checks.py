"""What must hold of the device kernels, wherever they run: interpreter, lowered code, a real GPU.

Each check runs one kernel by its launcher and compares with `kernels/reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import ModuleType

import torch

from hyper_parallel.kernels import reference
from hyper_parallel.platform.torch.wire_format import PartialNorm, WireFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADER_NUMEL = 23
ERROR_VOTE, NONFINITE_VOTE, HUGE_VOTE = 1, 3, 4
NUM_VOTES = 7
OWN_HEADER = [1.0, *[0.0] * NUM_VOTES, *(float(1 + i) for i in range(HEADER_NUMEL - 1 - NUM_VOTES))]
HUGE = 2.0**75

# Around a block of 4096, and of a segment where 3 programs share the work.
SIZES = [0, 1, 2, 7, 4095, 4096, 4097, 30_005]

# Of the sum, relative: half as much of the norm is 2^-20 of its last place.
MAX_SUM_ERROR = Fraction(1, 2**43)


def amid(filler: float, tensor: torch.Tensor, before: int) -> torch.Tensor:
    """Copy a flat tensor to where a number is on both sides of it, `before` of them in front."""
    around = torch.full((before + tensor.numel() + 5,), filler, dtype=tensor.dtype)
    return around.to(tensor.device)[before : before + tensor.numel()].copy_(tensor)


def wire_format(digit_bits: int, norm_type: float = 2.0) -> WireFormat:
    """Return the format of the largest group whose digits have so many bits."""
    wire = WireFormat(1 << (24 - digit_bits), norm_type)
    assert wire.digit_bits == digit_bits
    return wire


def host_lane(
    value: float, digit_bits: int, num_nan: int = 0, num_inf: int = 0, norm_type: float = 2.0
) -> list[float]:
    """Return a lane as the host encodes it."""
    lane = wire_format(digit_bits, norm_type).encode(PartialNorm(value, num_nan, num_inf))
    return lane.tolist()


def lane_of_digits(digit_bits: int, digits: Mapping[int, float]) -> list[float]:
    """Return a lane that has these digits by place, and zeros."""
    lane = [0.0] * wire_format(digit_bits).lane_numel
    for place, digit in digits.items():
        lane[2 + place] = digit
    return lane


def lane_format(kernels: ModuleType, power: int, digit_bits: int):
    return kernels.LaneFormat(
        power=power,
        header_numel=HEADER_NUMEL,
        lane_numel=wire_format(digit_bits).lane_numel,
        digit_bits=digit_bits,
        nonfinite_vote=NONFINITE_VOTE,
        huge_vote=HUGE_VOTE,
        error_vote=ERROR_VOTE,
        num_votes=NUM_VOTES,
        group_size=1 << (24 - digit_bits),
    )


def check_partial_norms(kernels: ModuleType, tensors: Sequence[torch.Tensor], power: int) -> None:
    """Every tensor's rows say what exact arithmetic says."""
    launcher = kernels.Launcher(tensors, [0] * len(tensors), tensors[0].device)
    rows, ranges = launcher.partial_norms(tensors, power).cpu(), launcher.plan.row_range_of
    sums = kernels.totals_of_ranges(rows, ranges, power) if power else None
    maxima = kernels.totals_of_ranges(rows, ranges, 0)  # which rows of any power have
    for i, tensor in enumerate(tensors):
        exact = reference.partial_norms(tensor, power)
        is_finite = not (exact.num_nan or exact.num_inf)
        counts = None if is_finite else (exact.num_nan, exact.num_inf)
        assert maxima.nonfinite.get(i) == counts
        assert maxima.values[i] == (exact.max_abs if is_finite else 0.0)
        if sums is not None:
            assert sums.nonfinite.get(i) == counts
            assert_near(sums.values[i], exact.pow_sum if is_finite else Fraction(0))
    if power == 0:
        assert not rows[:, :16].any()


def assert_near(value: float, exact: Fraction) -> None:
    if exact > Fraction(2) ** 1023:
        assert math.isinf(value) or value > 1e300
    else:
        assert math.isfinite(value)
        assert abs(Fraction(value) - exact) <= exact * MAX_SUM_ERROR


def check_encode(
    kernels: ModuleType,
    lanes: Sequence[Sequence[torch.Tensor]],
    power: int,
    digit_bits: int,
    incoming: Sequence[Sequence[float]],
    votes: Sequence[float] = (0.0,) * HEADER_NUMEL,
) -> None:
    """Encode tensors lane by lane, and all of them into one lane more."""
    tensors = [tensor for lane in lanes for tensor in lane]
    lane_of = [i for i, lane in enumerate(lanes) for _ in lane]
    form = lane_format(kernels, power, digit_bits)
    launcher = kernels.Launcher(tensors, lane_of, tensors[0].device)
    launcher.partial_norms(tensors, power)
    ranges = [launcher.plan.row_range_of_lane(lane) for lane in range(len(lanes))]
    table = kernels.LaneTable([*ranges, (0, launcher.plan.num_rows)], [], tensors[0].device)
    before = torch.tensor([*votes, *(x for lane in incoming for x in lane)], dtype=torch.float32)
    device = tensors[0].device
    arrived = before.to(device)
    outgoing = torch.full_like(arrived, math.nan)
    launcher.encode(arrived, outgoing, table, form)
    assert torch.equal(arrived.cpu(), before)
    after = outgoing.cpu()
    per_lane = after[HEADER_NUMEL:].view(len(lanes) + 1, form.lane_numel).tolist()
    for members, old, new in zip([*lanes, tensors], incoming, per_lane, strict=True):
        exact = [reference.partial_norms(tensor, power) for tensor in members]
        _check_lane(old, new, exact, power, digit_bits)
    exact = [reference.partial_norms(tensor, power) for tensor in tensors]
    nonfinite = any(m.num_nan or m.num_inf for m in exact)
    expected = list(votes)
    expected[NONFINITE_VOTE] = max(votes[NONFINITE_VOTE], float(nonfinite))
    expected[HUGE_VOTE] = max(votes[HUGE_VOTE], float(any(m.max_abs > HUGE for m in exact)))
    assert after[:HEADER_NUMEL].tolist() == expected


def check_huge_votes(kernels: ModuleType) -> None:
    """That a norm may overflow is voted for elements beyond the bound, and for no others.

    A vote that the host has cast stays.
    """
    below, above = HUGE * (1.0 - 2.0**-24), HUGE * (1.0 + 2.0**-23)  # neighbours in float32
    incoming = [host_lane(1.0, 17)] * 3
    ones = [torch.ones(3)]
    for largest in (1.0, below, -HUGE, HUGE, above, -above, 3e38):
        lanes = [ones, [torch.full((5,), largest)]]
        for vote in (0.0, 1.0):
            votes = [0.0] * HEADER_NUMEL
            votes[HUGE_VOTE] = vote
            check_encode(kernels, lanes, 2, 17, incoming, votes)


def _check_lane(
    old: Sequence[float],
    new: Sequence[float],
    exact: Sequence[reference.Measured],
    power: int,
    digit_bits: int,
) -> None:
    num_nan = sum(m.num_nan for m in exact)
    num_inf = sum(m.num_inf for m in exact)
    if power == 0:
        assert new[:2] == [max(old[0], float(num_nan > 0)), max(old[1], float(num_inf > 0))]
        if not (num_nan or num_inf):
            assert new[2] == max(old[2], *(m.max_abs for m in exact))
        assert new[3:] == list(old[3:])
        return
    most = 2.0**digit_bits - 1
    assert new[:2] == [min(old[0] + num_nan, most), min(old[1] + num_inf, most)]
    assert all(digit == int(digit) and abs(digit) <= 2**digit_bits for digit in new[2:])
    if num_nan or num_inf:
        return
    added = sum((m.pow_sum for m in exact), Fraction(0))
    decoded = reference.decode_lane(new, digit_bits) - reference.decode_lane(old, digit_bits)
    assert abs(decoded - added) <= added * MAX_SUM_ERROR


def check_finish(
    kernels: ModuleType,
    lanes: Sequence[Sequence[float]],
    power: int,
    digit_bits: int,
    max_norm: float,
    device: str = "cpu",
    header: Sequence[float] | None = None,
    *,
    is_agreed: bool = True,
) -> None:
    """Add up every second lane of a buffer, as a rank does that is in some rank sets only.

    And each of these alone, in the same launch.

    Args:
        kernels: The kernels.
        lanes: Those.
        power: Of the norm.
        digit_bits: Of the lanes.
        max_norm: To clip to.
        device: Where.
        header: Reduced; by default as if all ranks had brought `OWN_HEADER`.
        is_agreed: Whether that should pass for agreement.
    """
    form = lane_format(kernels, power, digit_bits)
    foreign = [3.0] * form.lane_numel
    floats = [*(header or agreed_header(power, digit_bits))]
    starts = []
    for lane in lanes:
        starts.append(len(floats))
        floats += [*lane, *foreign]
    buffer = torch.tensor(floats, dtype=torch.float32, device=device)
    lists = [starts, *([start] for start in starts)]
    results = torch.full((len(lists), 3), -1.0, device=device)
    table = kernels.LaneTable([], lists, buffer.device)
    own = torch.tensor([*OWN_HEADER, 5.0], device=device)
    kernels.Launcher([], [], buffer.device).finish(buffer, own, results, table, max_norm, form)
    for group, result in zip([lanes, *([lane] for lane in lanes)], results.tolist(), strict=True):
        expected = reference.finish(group, power, digit_bits, max_norm)
        if not is_agreed:
            expected = (math.nan, 1.0, 0.0)
        assert repr(result) == repr([*expected])  # repr: NaN equals NaN


def agreed_header(power: int, digit_bits: int) -> list[float]:
    """Return what the reduce makes of `OWN_HEADER`, with a vote or two."""
    num_addends = 1 << (24 - digit_bits) if power else 1
    header = [num_addends * value for value in OWN_HEADER]
    header[NONFINITE_VOTE], header[NUM_VOTES] = 1.0, 2.0
    return header


def check_scale(kernels: ModuleType, tensors: Sequence[torch.Tensor], coefficient: float) -> None:
    """Scale tensors in place; nothing beside them is touched."""
    expected = [reference.scale(tensor.cpu(), coefficient) for tensor in tensors]
    around = [_surroundings(tensor) for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    factor = torch.tensor([coefficient], device=tensors[0].device)
    kernels.Launcher(tensors, [0] * len(tensors), tensors[0].device).scale_(tensors, factor)
    for tensor, right in zip(tensors, expected, strict=True):
        assert same_bits(tensor.cpu(), right)
    for tensor, before in zip(tensors, around, strict=True):
        assert same_bits(_surroundings(tensor), before)
    assert all(tensor._version > before for tensor, before in zip(tensors, versions, strict=True))


def _surroundings(tensor: torch.Tensor) -> torch.Tensor:
    """Return what shares the tensor's storage without being its own."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.as_strided((size,), (1,), 0).clone().cpu()
    begin = tensor.storage_offset()
    return torch.cat([whole[:begin], whole[begin + tensor.numel() :]])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have the same bits, any NaN being like any other."""
    nan = a.isnan()
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    a, b, also_nan = a.masked_fill(nan, 0.0), b.masked_fill(b.isnan(), 0.0), b.isnan()
    return (
        a.dtype == b.dtype
        and torch.equal(nan, also_nan)
        and torch.equal(a.view(kind), b.view(kind))
    )
