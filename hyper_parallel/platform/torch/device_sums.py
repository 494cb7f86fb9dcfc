"""Sums of squares of pieces of a device tensor, and of which elements a change would tell.

In torch operators, and only for devices with float64. Nothing here waits for the device
but at set-up.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .chunks import DEVICE_CHUNK_NUMEL

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BITS_OF", "SamplePlan", "SampledPlaces", "measurable_dtypes", "measure_chunks"]

BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""The dtypes that are measured early, and the integers that hold their bits."""

# Of each dtype the bits of a number's fraction, and of its magnitude.
_FRACTIONS = {
    torch.float32: (0x7FFFFF, 0x7FFFFFFF),
    torch.bfloat16: (0x7F, 0x7FFF),
    torch.float16: (0x3FF, 0x7FFF),
}


class SampledPlaces(NamedTuple):
    """Where one shard's part of sums and samples is.

    Attributes:
        chunks: Which of the sums.
        fixed: Of elements that are always looked at: place in the shard, and of its bits in the
            samples.
        telling: Of elements that the device chooses in each chunk: place of the chunk in the shard;
            in the samples the place of the element in the chunk, and of its bits.
    """

    chunks: slice
    fixed: Sequence[tuple[int, int]]
    telling: Sequence[tuple[int, int, int]]


class SamplePlan:
    """What is measured of a buffer that holds shards one after the other, with padding.

    The first, the middle and the last element of each shard are sampled, and two of each chunk: the
    largest, which every clamp changes first, and the finest, whose next smaller neighbour is the
    nearest in proportion, so that a factor below 1, such as a clip coefficient, that is rounded
    away there is rounded away everywhere.

    Args:
        numels: Of each shard with and without padding.
        device: Of the buffer.

    Attributes:
        numels: As passed.
        chunks: Pieces of shards in the buffer, of at most `DEVICE_CHUNK_NUMEL` elements, so that a
            place in one fits an int32.
        chunk_starts: [2 * num_chunks] int64, device: where they start, twice.
        sampled: [num_fixed] int64, device: places in the buffer of elements always looked at.
        samples: int32, pinned: bits of those; bits of each chunk's largest element, then of each
            one's finest; and the places of these in their chunks.
        places: Of each shard.

    Sync: two blocking copies to the device.
    """

    def __init__(self, numels: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.numels = list(numels)
        self.chunks: list[slice] = []
        fixed: list[list[int]] = []
        of_shard: list[tuple[int, range, range]] = []
        start = 0
        for padded_numel, numel in numels:
            own = range(start, start + numel, DEVICE_CHUNK_NUMEL)
            of_shard.append((start, own, range(len(self.chunks), len(self.chunks) + len(own))))
            self.chunks += [slice(i, min(i + DEVICE_CHUNK_NUMEL, start + numel)) for i in own]
            fixed.append(sorted({0, numel // 2, numel - 1}) if numel else [])
            start += padded_numel
        num_fixed, num_telling = sum(map(len, fixed)), 2 * len(self.chunks)
        numbers = itertools.count()
        self.places = [
            SampledPlaces(
                slice(indices.start, indices.stop),
                [(place, next(numbers)) for place in places],
                [
                    (chunk - first, num_fixed + num_telling + i, num_fixed + i)
                    for chunk, index in zip(own, indices, strict=True)
                    for i in (index, len(self.chunks) + index)
                ],
            )
            for (first, own, indices), places in zip(of_shard, fixed, strict=True)
        ]
        in_buffer = [
            first + place
            for (first, _, _), own in zip(of_shard, fixed, strict=True)
            for place in own
        ]
        starts = [chunk.start for chunk in self.chunks]
        self.sampled = torch.tensor(in_buffer, dtype=torch.int64, device=device)
        self.chunk_starts = torch.tensor(2 * starts, dtype=torch.int64, device=device)
        self.samples = torch.empty(
            num_fixed + 2 * num_telling, dtype=torch.int32, device="cpu", pin_memory=True
        )


def measure_chunks(
    chunks: Sequence[torch.Tensor], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each chunk's sum of squares, and the places of its telling elements.

    Args:
        chunks: 1-D, of a dtype in `BITS_OF`, on one device; none is empty.
        like: A tensor of theirs.

    Returns:
        [num_chunks] float64, of exact squares; and [2 * num_chunks] int64: the largest element of
        each, then the finest of each (`SamplePlan`). Both on the device.
    """
    if not chunks:
        return like.new_empty(0, dtype=torch.float64), like.new_empty(0, dtype=torch.int64)
    sums = torch.stack([torch.dot(x, x) for x in map(torch.Tensor.double, chunks)])
    largest = [chunk.abs().argmax() for chunk in chunks]
    finest = [_fineness(chunk).argmax() for chunk in chunks]
    return sums, torch.stack([*largest, *finest])


def _fineness(chunk: torch.Tensor) -> torch.Tensor:
    """Return integers that are the larger, the nearer an element's next smaller neighbour is.

    In proportion, that is the larger the fraction, and a power of two is the finest, for numbers
    below it are twice as dense. Subnormal ones are the coarsest, with zero.
    """
    fraction, magnitude = _FRACTIONS[chunk.dtype]
    bits = chunk.view(BITS_OF[chunk.dtype]) & magnitude
    # 1 less turns the fraction of a power of two, 0, into the largest.
    return bits.clamp_(min=fraction + 2).sub_(1).bitwise_and_(fraction)


@functools.cache
def measurable_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Return those of `BITS_OF` for which the device has all operators that this and lanes take.

    Tried out at set-up: in a backward pass an error could as well be one of a collective before.

    Sync: the device.
    """
    module = torch.get_device_module(device)
    module.synchronize(device)  # what others have launched, whose errors are theirs
    measurable = set()
    for dtype, integer in BITS_OF.items():
        with contextlib.suppress(RuntimeError, TypeError):
            x = torch.ones(2, device=device).to(dtype)
            sums, places = measure_chunks([x], x)
            x.view(integer).index_select(0, places).int()
            sums.view(torch.int64) >> 1
            module.synchronize(device)
            measurable.add(dtype)
    return frozenset(measurable)
