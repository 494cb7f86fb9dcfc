"""Partial norms to lanes and back, exactly.

The reduction buffer is float32, since every accelerator backend reduces that: a header, then one
lane per rank set. Two formats share its size, so that ranks that disagree on the norm type still
run the same collective and learn of it from the header.

Under SUM (finite norm types) a lane is `[NaN count, inf count, digits...]`: a non-negative
float64, or an exact sum, as base-2^w digits of one fixed-point grid from 2^-1074 to 2^1024, lowest
digit first, each an integer. With w = 24 - ceil(log2(group size)) the sum of a digit over all ranks
stays within 2^24, where float32 addition is exact in any order, so the reduce adds no rounding
whatever its algorithm or topology: 124 floats a lane at 128 ranks, 191 at 8192, besides the two
counts.

Under MAX (norm types inf and -inf) a lane is `[NaN flag, inf flag, value, 0...]`, the value
negated for -inf.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, overload

from .finish import GRID_EXPONENT, LaneTotal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "NUM_CALL_KINDS",
    "VOTE_PLACES",
    "PartialNorm",
    "PartialNorms",
    "Votes",
    "WireFormat",
    "fingerprint",
]

_GRID_BITS = 1024 - GRID_EXPONENT
_FLOAT32_EXACT_BITS = 24
_FINGERPRINT_BITS = 60

NUM_CALL_KINDS = 4
"""Numbers that `pack` takes as `call_kind`: what a piece of a header holds in the largest group."""


class PartialNorm(NamedTuple):
    """What one rank contributes of one or more gradient shards.

    Attributes:
        value: Sum of |g|^p, count of nonzeros (p = 0), max |g| (inf) or min |g| (-inf), in
            float64; the identity (0, and inf for -inf) of an empty shard.
        num_nan: NaN elements that reach the norm.
        num_inf: Infinite elements that make the norm infinite.
        overflows: Finite elements whose powers sum to more than float64 holds.
        grid_sum: The sum that `value` rounds, in units of 2^GRID_EXPONENT, where it is known.
    """

    value: float
    num_nan: int = 0
    num_inf: int = 0
    overflows: bool = False
    grid_sum: int | None = None

    @property
    def is_nonfinite(self) -> bool:
        """Whether it makes the norm NaN or infinite."""
        return self.num_nan > 0 or self.num_inf > 0 or self.overflows

    def to_grid(self) -> int:
        """Return the sum in units of 2^GRID_EXPONENT, of which every float64 is a multiple."""
        if self.grid_sum is not None:
            return self.grid_sum
        numerator, denominator = self.value.as_integer_ratio()
        return numerator << -GRID_EXPONENT - denominator.bit_length() + 1


class PartialNorms(Sequence[PartialNorm]):
    """Partial norms of many gradient shards: a column of values, and what is to say beyond them.

    Args:
        values: `PartialNorm.value` of each.
        others: By index, those of which more is to say than the value.

    Attributes:
        values: As passed.
        others: As passed.
    """

    def __init__(
        self,
        values: Sequence[float],
        others: Mapping[int, PartialNorm] = MappingProxyType({}),
    ) -> None:
        self.values = values
        self.others = others

    @classmethod
    def of(cls, partials: Iterable[PartialNorm]) -> PartialNorms:
        """Turn rows into columns."""
        rows = list(partials)
        others = {i: row for i, row in enumerate(rows) if row != PartialNorm(row.value)}
        return cls([row.value for row in rows], others)

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> PartialNorm: ...
    @overload
    def __getitem__(self, index: slice) -> PartialNorms: ...
    def __getitem__(self, index: int | slice) -> PartialNorm | PartialNorms:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        value = self.values[index]
        return self.others.get(index % len(self)) or PartialNorm(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def select(self, indices: Sequence[int]) -> PartialNorms:
        """Return those at `indices`, in that order."""
        if indices == range(len(self)):
            return self
        values = list(map(self.values.__getitem__, indices))
        if not self.others:
            return PartialNorms(values)
        others = {i: self.others[j] for i, j in enumerate(indices) if j in self.others}
        return PartialNorms(values, others)


@dataclass(frozen=True)
class Votes:
    """One flag per question that all ranks answer together after the reduce they do anyway.

    Before the reduce: this rank says yes. After it: some rank of the group does.
    """

    error: bool = False
    new_rank_set: bool = False
    nonfinite: bool = False
    huge: bool = False
    float64_gradient: bool = False
    partial_gradient: bool = False
    frozen: bool = False  # and this rank starts no other collective, whatever the votes


_NUM_VOTES = len(fields(Votes))
VOTE_PLACES = {field.name: 1 + i for i, field in enumerate(fields(Votes))}
"""Where each vote is in the header. Under SUM any number above 0 there is a yes."""


def fingerprint(*values: float) -> int:
    """Return 60 bits that tell apart what ranks must all have passed alike."""
    packed = struct.pack(f"<{len(values)}d", *values)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _FINGERPRINT_BITS)


class WireFormat:
    """Layout of header and lanes for one group size and norm type.

    Args:
        group_size: Number of ranks whose buffers are reduced; at most 2^20.
        norm_type: Any p >= 0, inf or -inf.

    Attributes:
        op: `"sum"` or `"max"`, the reduce that combines two buffers.
        header_numel: Floats before the first lane.
        lane_numel: Floats per lane.
    """

    def __init__(self, group_size: int, norm_type: float) -> None:
        if not 1 <= group_size <= 1 << 20:
            raise ValueError(f"expected 1 to 2^20 ranks in a group, got {group_size}")
        self.group_size = group_size
        self.norm_type = norm_type
        self.op = "max" if math.isinf(norm_type) else "sum"
        self.digit_bits = _FLOAT32_EXACT_BITS - (group_size - 1).bit_length()
        self.lane_numel = 2 + -(-_GRID_BITS // self.digit_bits)
        # Squares of pieces must sum exactly as well, hence half the bits of a digit.
        self._piece_bits = self.digit_bits // 2
        self._num_pieces = -(-_FINGERPRINT_BITS // self._piece_bits)
        self.header_numel = 1 + _NUM_VOTES + 2 * (1 + self._num_pieces)

    def combine(self, partials: Iterable[PartialNorm]) -> PartialNorm:
        """Combine partial norms of one rank into one.

        Sums are rounded once (math.fsum), and known exactly if any of them is.
        """
        columns = partials if isinstance(partials, PartialNorms) else PartialNorms.of(partials)
        values, others = columns.values, columns.others.values()
        if self.op == "sum":
            value = _sum_within_float64(values)
        elif self.norm_type > 0:
            value = max(values, default=0.0)
        else:
            value = min(values, default=math.inf)
        overflowed = self.op == "sum" and math.isinf(value)
        is_exact = any(partial.grid_sum is not None for partial in others)
        return PartialNorm(
            value=0.0 if overflowed else value,
            num_nan=sum(partial.num_nan for partial in others),
            num_inf=sum(partial.num_inf for partial in others),
            overflows=overflowed or any(partial.overflows for partial in others),
            grid_sum=sum(partial.to_grid() for partial in columns) if is_exact else None,
        )

    def to_total(self, partial: PartialNorm) -> LaneTotal:
        """Return a partial norm that is not reduced as the total of a lane it has to itself."""
        if self.op == "max":
            return LaneTotal(
                extremum=partial.value, num_nan=partial.num_nan, num_inf=partial.num_inf
            )
        return self.decode(self.encode(partial))

    def pack(
        self,
        votes: Votes,
        stamp: int,
        lanes: Sequence[PartialNorm | None],
        call_kind: int = 0,
    ) -> array[float]:
        """Return one rank's whole buffer.

        Args:
            votes: The rank's.
            stamp: What all ranks must have asked for alike, see `fingerprint`.
            lanes: None is one to which it contributes nothing.
            call_kind: Below `NUM_CALL_KINDS`; where ranks pass different ones, all read the vote
                `new_rank_set`.
        """
        buffer = array("f", self.pack_header(votes, stamp, call_kind))
        idle = self.encode(None)
        for lane in lanes:
            buffer.extend(idle if lane is None else self.encode(lane))
        return buffer

    def pack_header(self, votes: Votes, stamp: int, call_kind: int = 0) -> list[float]:
        """Return what is before the lanes, `header_numel` whole numbers; see `pack`."""
        header = [1.0, *(float(getattr(votes, field.name)) for field in fields(Votes))]
        for piece in [1 + call_kind, *self._pieces(stamp)]:
            header += [float(piece), float(piece * piece if self.op == "sum" else -piece)]
        return header

    def encode(self, partial: PartialNorm | None) -> array[float]:
        """Return the lane of one rank's partial norm, `lane_numel` floats."""
        lane = array("f", bytes(4 * self.lane_numel))
        if self.op == "max":
            if self.norm_type < 0:
                lane[2] = -math.inf
            if partial is not None:
                lane[0], lane[1] = float(partial.num_nan > 0), float(partial.num_inf > 0)
                lane[2] = partial.value if self.norm_type > 0 else -partial.value
            return lane
        if partial is not None:
            most = (1 << self.digit_bits) - 1
            num_inf = partial.num_inf + partial.overflows
            lane[0], lane[1] = min(partial.num_nan, most), min(num_inf, most)
            rest = partial.to_grid()
            index = _num_zero_bits(rest) // self.digit_bits
            rest >>= index * self.digit_bits
            while rest:
                lane[2 + index] = rest & most
                rest >>= self.digit_bits
                index += 1
        return lane

    def decode(self, lane: Sequence[float]) -> LaneTotal:
        """Return what a lane holds, before or after the reduce."""
        if self.op == "max":
            return LaneTotal(
                extremum=lane[2] if self.norm_type > 0 else -lane[2],
                num_nan=int(lane[0]),
                num_inf=int(lane[1]),
            )
        grid_sum = 0
        for digit in reversed(lane[2:]):
            grid_sum = (grid_sum << self.digit_bits) + int(digit)
        return LaneTotal(grid_sum=grid_sum, num_nan=int(lane[0]), num_inf=int(lane[1]))

    def decode_header(
        self, header: Sequence[float], stamp: int, call_kind: int = 0
    ) -> Votes | None:
        """Return the group's votes, or None if some rank's stamp or norm type differs from ours.

        For the host, which reads headers of clips that are not frozen: with a rank of a frozen one
        among them the stamps differ, and only the vote `frozen` is of use.

        A sum alone does not prove that all values are equal; sums of v and v^2 do (Cauchy and
        Schwarz), and so do the maxima of v and -v. The leading one is `group_size` only if every
        addition was one, and 1 only if none was: it tells a mixture of SUM and MAX. All ranks
        come to the same answer, since each compares with its own value.
        """
        count = self.group_size if self.op == "sum" else 1
        proofs = [
            [count * piece, count * piece * piece if self.op == "sum" else -piece]
            for piece in [1 + call_kind, *self._pieces(stamp)]
        ]
        start = 1 + _NUM_VOTES
        votes = Votes(*(vote > 0 for vote in header[1:start]))
        if votes.frozen:
            return votes
        read = [list(header[i : i + 2]) for i in range(start, len(header), 2)]
        if header[0] != count or read[1:] != proofs[1:]:
            return None
        return votes if read[0] == proofs[0] else replace(votes, new_rank_set=True)

    def _pieces(self, stamp: int) -> list[int]:
        """Cut a fingerprint into pieces from 1 to 2^piece_bits; never 0, which proves nothing."""
        mask = (1 << self._piece_bits) - 1
        return [1 + (stamp >> self._piece_bits * i & mask) for i in range(self._num_pieces)]


def _num_zero_bits(n: int) -> int:
    """Return how many low bits of an integer are zero; of 0, none."""
    return max(0, (n & -n).bit_length() - 1)


def _sum_within_float64(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
