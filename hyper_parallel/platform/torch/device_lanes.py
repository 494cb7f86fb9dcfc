"""Sums of squares on a device to exact lanes, without a look at them.

`WireFormat.encode` in torch operators, for values that are not to be brought to the host. A
float64 is a 53-bit whole number times 2^-1074 times a power of two, so each digit of its lane is a
shift and a mask of int64; lanes of values are added as int64, and carries taken until no digit
exceeds 2^digit_bits. Nothing is rounded, whatever the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .wire_format import WireFormat

__all__ = ["encode", "to_lanes"]

_FRACTION_BITS = 52
_EXPONENT_MASK = 0x7FF
_INT64_BITS = 64


def encode(values: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Return the lane of each value, digits lowest first.

    Args:
        values: [n] float64, each 0 or more, infinite or NaN.
        wire: The format, of a finite norm type.

    Returns:
        [n, wire.lane_numel] int64 on the same device.

    Sync: none.
    """
    is_nan, is_inf = values.isnan(), values.isinf()
    finite = torch.where(is_nan | is_inf, torch.zeros_like(values), values)
    bits = finite.view(torch.int64)
    exponents = (bits >> _FRACTION_BITS) & _EXPONENT_MASK
    fractions = bits & ((1 << _FRACTION_BITS) - 1)
    # Exponents 0, of subnormals, and 1 share the unit 2^-1074.
    shifts = (exponents - 1).clamp(min=0)
    significands = fractions + (exponents > 0).to(torch.int64) * (1 << _FRACTION_BITS)
    lowest_bits = torch.arange(
        0,
        (wire.lane_numel - 2) * wire.digit_bits,
        wire.digit_bits,
        dtype=torch.int64,
        device=values.device,
    )
    down = lowest_bits - shifts.unsqueeze(1)  # how far the digit's lowest bit is above bit 0
    above = significands.unsqueeze(1) >> down.clamp(0, _INT64_BITS - 1)
    # Bits that leave int64 at the top are above the digit, and masked.
    below = significands.unsqueeze(1) << (-down).clamp(0, wire.digit_bits)
    digits = torch.where(down >= 0, above, below) & ((1 << wire.digit_bits) - 1)
    return torch.cat([torch.stack([is_nan, is_inf], dim=1).to(torch.int64), digits], dim=1)


def to_lanes(rows: torch.Tensor, num_added: int, wire: WireFormat) -> torch.Tensor:
    """Return sums of encoded values as lanes: each digit small enough to be added over ranks.

    That is, at most 2^digit_bits, for then the sum over all ranks is at most 2^24.

    Args:
        rows: [n, wire.lane_numel] int64.
        num_added: How many values were added to a row at most.
        wire: As for `encode`.

    Returns:
        [n, wire.lane_numel] float32, whole numbers.

    Sync: none.
    """
    most = (1 << wire.digit_bits) - 1
    counts, digits = rows[:, :2].clamp(max=most), rows[:, 2:]
    bound = num_added * most
    while bound > most + 1:
        carried = torch.nn.functional.pad(digits[:, :-1] >> wire.digit_bits, (1, 0))
        digits = (digits & most) + carried
        bound = most + (bound >> wire.digit_bits)
    return torch.cat([counts, digits], dim=1).to(torch.float32)
