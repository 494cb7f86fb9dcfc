"""Partial norms taken before the gradients went to the host, and whether they still hold.

A hook (`norm_before_offload`) leaves one `EarlyNorm` for each gradient. At the clip it holds if
the gradient is the very tensor of that backward pass, at the same place in memory, its version
counters say that nobody wrote to it, and a few of its elements, which the hook has sent along, are
still what they were: counters miss writes through `.data`, `_foreach_` operators on DTensors and
raw pointers.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .clip_result import Copies
from .device_lanes import encode, to_lanes
from .torch_private import versions_of
from .wire_format import PartialNorm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .device_sums import SampledPlaces
    from .grad_shards import GradShards
    from .lanes import LaneKey
    from .torch_private_fsdp import FsdpParameter
    from .wire_format import WireFormat

__all__ = [
    "EarlyNorm",
    "EarlySums",
    "Known",
    "Measurement",
    "drop",
    "find",
    "keep",
    "none_for",
    "outdate",
]

_INTEGERS = {2: ctypes.c_int16, 4: ctypes.c_int32}


@dataclass(eq=False)
class Measurement:
    """What a hook measured in one backward pass, of all gradients of its group.

    Attributes:
        sums: [num_chunks] float64, device: the sum of squares of each chunk of a gradient.
        samples: int32, pinned: bits of elements, and places of others. Valid once it has arrived.
        arrived: Recorded behind all of that.
    """

    sums: torch.Tensor
    samples: torch.Tensor
    arrived: torch.Event
    _read: list[int] | None = None

    def read_samples(self) -> tuple[list[int], Copies]:
        """Return the samples on the host.

        Sync: none where FSDP2 has waited for the gradients, which were copied behind them.
        """
        copies = Copies()
        if self._read is None:
            if not self.arrived.query():
                self.arrived.synchronize()
                copies = Copies(host_syncs=1)
            self._read = self.samples.tolist()
        return self._read, copies


@dataclass(eq=False)
class EarlyNorm:
    """The early partial norm of one gradient.

    Attributes:
        segment: Whose parameter has the gradient, a DTensor. No weak reference to that itself, for
            then torch could not swap it, as `Module.to` does.
        grad_id: The `id` of the DTensor.
        versions: Of it and its shard, as the backward pass left them.
        data_ptr: Where the shard is.
        measurement: Which holds the sums.
        places: Which of its sums and samples are this gradient's.
    """

    segment: weakref.ref[FsdpParameter]
    grad_id: int
    versions: tuple[int, ...]
    data_ptr: int
    measurement: Measurement
    places: SampledPlaces

    def is_of(self, local: torch.Tensor) -> bool:
        """Tell whether it is of this tensor, unwritten as far as torch counts."""
        segment = self.segment()
        grad = segment.parameter.grad if segment is not None else None
        return (
            grad is not None
            and id(grad) == self.grad_id
            and self.versions == versions_of(grad, local)
            and self.data_ptr == local.data_ptr()
        )

    def agrees_with(self, samples: Sequence[int], item_bytes: int) -> bool:
        """Compare the sampled elements' bits; the memory is read without torch, for speed."""
        bits_at = _INTEGERS[item_bytes].from_address
        start = self.data_ptr
        fixed, telling = self.places.fixed, self.places.telling
        return [bits_at(start + item_bytes * place).value for place, _ in fixed] == [
            samples[i] for _, i in fixed
        ] and [
            bits_at(start + item_bytes * (chunk + samples[i])).value for chunk, i, _ in telling
        ] == [samples[j] for _, _, j in telling]


@dataclass(eq=False)
class Known:
    """What is known of a shard: its early norm, or why it has none.

    Attributes:
        local: The shard.
        early: Its early norm.
        reason: Why it has none, if so.
    """

    local: weakref.ref[torch.Tensor]
    early: EarlyNorm | None = None
    reason: str = ""

    def refuse(self, reason: str) -> None:
        """Drop the early norm."""
        self.early, self.reason = None, reason


# By the id of the shard; what is found is compared with the shard itself, since ids come again.
_known: dict[int, Known] = {}


def keep(local: torch.Tensor, early: EarlyNorm | None, reason: str = "") -> tuple[int, Known]:
    """Remember the early norm of a shard, or why it has none. Return what `drop` needs."""
    known = _known[id(local)] = Known(weakref.ref(local), early, reason)
    return id(local), known


def outdate(locals_: Iterable[torch.Tensor], reason: str) -> None:
    """Remember why shards that have an early norm have none any more."""
    for local in locals_ if _known else ():
        known = _known.get(id(local))
        if known is not None and known.local() is local:
            known.refuse(reason)


def drop(kept: Mapping[int, Known]) -> None:
    """Forget what was kept, but not what is kept of others that got the same ids since."""
    for local_id, known in kept.items():
        if _known.get(local_id) is known:
            del _known[local_id]


@dataclass
class EarlySums:
    """Early partial norms that hold, still on the device.

    Attributes:
        indices: Of which shards.
        sums: [num_chunks] float64 each, device, by the lane that they belong to.
        reasons: Why the other shards have none, and how many of them.
        sampled_bytes: Bytes of the host's gradients that were compared.
        copies: What waiting for the samples cost.
    """

    indices: list[int] = field(default_factory=list)
    sums: dict[LaneKey, list[torch.Tensor]] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    sampled_bytes: int = 0
    copies: Copies = field(default_factory=Copies)

    @property
    def device(self) -> torch.device | None:
        """Where they are, if there are any."""
        return next((sums[0].device for sums in self.sums.values()), None)

    def fetch(self, wire: WireFormat) -> dict[LaneKey, PartialNorm]:
        """Bring them to the host, one exact partial norm per lane, and keep none.

        Sync: one blocking copy, which is counted.
        """
        if not self.sums:
            return {}
        counts = [sum(part.numel() for part in parts) for parts in self.sums.values()]
        rows = encode(torch.cat(list(itertools.chain(*self.sums.values()))), wire)
        added = torch.stack([part.sum(0) for part in torch.split(rows, counts)])
        fetched = {}
        for key, lane in zip(self.sums, to_lanes(added, max(counts), wire).tolist(), strict=True):
            total = wire.decode(lane)
            fetched[key] = PartialNorm(0.0, total.num_nan, total.num_inf, grid_sum=total.grid_sum)
        self.sums = {}
        self.copies += Copies(d2h=1, host_syncs=1)
        return fetched


def find(shards: GradShards) -> EarlySums:
    """Return the early partial norms that hold for these shards.

    Whatever it finds, ranks need not find alike: they reduce the same lanes.
    """
    if not _known:
        return EarlySums()
    found = EarlySums()
    reasons: Counter[str] = Counter()
    samples: dict[Measurement, list[int]] = {}
    runs = _Runs()
    for index, local in enumerate(shards.tensors):
        known = _known.get(id(local))
        if known is None or known.local() is not local:
            reasons["was not reduced by a module with the hook"] += 1
            continue
        early = known.early
        if early is None:
            reasons[known.reason] += 1
            continue
        if not early.is_of(local):
            reasons["was written or replaced since"] += 1
            continue
        measurement, places = early.measurement, early.places
        if measurement not in samples:
            samples[measurement], copies = measurement.read_samples()
            found.copies += copies
        item_bytes = local.element_size()
        found.sampled_bytes += item_bytes * (len(places.fixed) + len(places.telling))
        if not early.agrees_with(samples[measurement], item_bytes):
            reasons["has other elements than were measured"] += 1
            continue
        found.indices.append(index)
        runs.add(shards.reaches[index].rank_set, measurement.sums, places.chunks)
    found.sums = runs.sums()
    found.reasons = dict(reasons)
    _make_usable_here(samples)
    return found


def none_for(shards: GradShards, reason: str) -> EarlySums:
    """Return what `find` does where no early norm is of use, whatever it would find."""
    return EarlySums(reasons={reason: len(shards)} if _known and len(shards) else {})


class _Runs:
    """Parts of sums by lane, neighbours together: a slice for each would take its time."""

    def __init__(self) -> None:
        self._runs: dict[LaneKey, list[tuple[torch.Tensor, int, int]]] = {}

    def add(self, key: LaneKey, sums: torch.Tensor, chunks: slice) -> None:
        if chunks.start == chunks.stop:
            return
        runs = self._runs.setdefault(key, [])
        if runs and runs[-1][0] is sums and runs[-1][2] == chunks.start:
            runs[-1] = (sums, runs[-1][1], chunks.stop)
        else:
            runs.append((sums, chunks.start, chunks.stop))

    def sums(self) -> dict[LaneKey, list[torch.Tensor]]:
        return {
            key: [sums[start:stop] for sums, start, stop in runs]
            for key, runs in self._runs.items()
        }


def _make_usable_here(measurements: Iterable[Measurement]) -> None:
    """Let the current stream wait for the hooks' streams, on the device alone."""
    for measurement in measurements:
        sums = measurement.sums
        stream = torch.get_device_module(sums.device).current_stream(sums.device)
        stream.wait_event(measurement.arrived)
        sums.record_stream(stream)
