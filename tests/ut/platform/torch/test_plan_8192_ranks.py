"""The plan for thousands of ranks, without a process for any: all ranks run in turn.

What they exchange, the layout they build, and the exact sum of their buffers.
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch

from hyper_parallel.platform.torch.agreement import agree
from hyper_parallel.platform.torch.finish import round_norm, sum_totals
from hyper_parallel.platform.torch.lanes import Layout, RankSet, Statement
from hyper_parallel.platform.torch.wire_format import PartialNorm, Votes, WireFormat
from tests.reference import assert_rounds_sqrt


class Model(NamedTuple):
    """Replicas of FSDP x TP: weights are cut by both, norm weights by FSDP alone."""

    num_replicas: int
    num_fsdp: int
    num_tp: int

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * self.num_fsdp * self.num_tp

    def rank_sets(self, rank: int) -> list[RankSet]:
        replica = rank // (self.num_fsdp * self.num_tp)
        start, stop = (r * self.num_fsdp * self.num_tp for r in (replica, replica + 1))
        tp = rank % self.num_tp
        return [tuple(range(start, stop)), tuple(range(start + tp, stop, self.num_tp))]


class SimulatedGroup:
    """One rank's view of a group whose collectives are played back as far as they are known."""

    def __init__(self, rank: int, num_ranks: int, known: Sequence[object]) -> None:
        self.rank = self.group_rank = rank
        self.ranks = tuple(range(num_ranks))
        self.layout: Layout | None = None
        self._known = list(known)

    def gather_ints(self, values: Sequence[int]) -> object:
        return self._play("gather", values)

    def sum_ints(self, values: Sequence[int]) -> object:
        return self._play("sum", values)

    def _play(self, kind: str, values: Sequence[int]) -> object:
        if not self._known:
            raise CollectiveError(kind, values)
        return self._known.pop(0)


class CollectiveError(Exception):
    """A rank has come to a collective that not all have sent to yet."""

    def __init__(self, kind: str, values: Sequence[int]) -> None:
        super().__init__(kind)
        self.kind, self.values = kind, list(values)


def run_in_turn(
    num_ranks: int, step: Callable[[SimulatedGroup], Layout]
) -> tuple[list[Layout], list[int], float]:
    """Run a step on every rank, once more for every collective in it.

    Returns:
        The ranks' results, the bytes that a rank receives in each collective, and the median
        seconds of a rank's last run, when it knows all.
    """
    known: list[object] = []
    received_bytes: list[int] = []
    while True:
        layouts: list[Layout] = []
        sent: list[list[int]] = []
        kinds = set()
        seconds: list[float] = []
        for rank in range(num_ranks):
            start = time.perf_counter()
            try:
                layouts.append(step(SimulatedGroup(rank, num_ranks, known)))
            except CollectiveError as reached:
                kinds.add(reached.kind)
                sent.append(reached.values)
            seconds.append(time.perf_counter() - start)
        if not sent:
            return layouts, received_bytes, statistics.median(seconds)
        assert len(sent) == num_ranks, "some ranks came to a collective, and some did not"
        assert len(kinds) == 1
        if kinds == {"gather"}:
            known.append(sent)
            received_bytes.append(8 * num_ranks * (1 + max(map(len, sent))))  # lengths, then rows
        else:
            known.append(torch.tensor(sent).sum(0).tolist())
            received_bytes.append(4 * len(sent[0]))


@pytest.mark.parametrize(
    ("model", "exchange_bytes", "buffer_bytes"),
    [
        pytest.param(Model(2, 16, 4), 6_144, 5_144, id="128"),
        pytest.param(
            Model(4, 256, 8),
            393_216,
            27_928,
            marks=[pytest.mark.slow, pytest.mark.timeout(900)],
            id="8192",
        ),
    ],
)
def test_plan_of_many_ranks_is_the_same_on_all_and_sums_exactly(
    model, exchange_bytes, buffer_bytes
):
    num_ranks = model.num_ranks
    layouts, received_bytes, seconds = run_in_turn(
        num_ranks, lambda group: agree(group, Statement(model.rank_sets(group.rank)))
    )
    expected = sorted({s for rank in range(num_ranks) for s in model.rank_sets(rank)})
    assert len(expected) == model.num_replicas * (1 + model.num_tp)
    for rank, layout in enumerate(layouts):
        assert list(layout.lane_of) == expected
        assert list(layout.lane_of.values()) == list(range(len(expected)))
        assert sorted(layout.own_rank_sets) == sorted(model.rank_sets(rank))

    wire = WireFormat(num_ranks, 2.0)
    buffers, pack_seconds = pack_all(model, layouts, wire)
    assert (sum(received_bytes), 4 * buffers.shape[1]) == (exchange_bytes, buffer_bytes)
    total = torch.zeros_like(buffers[0])
    for buffer in buffers.flip(0):  # float32 additions, in any order
        total += buffer
    assert torch.equal(total, buffers.sum(0))
    for rank in (0, 1, num_ranks // 2, num_ranks - 1):
        lanes = total[wire.header_numel :].view(-1, wire.lane_numel)
        totals = [
            wire.decode(lanes[layouts[rank].lane_of[s]].tolist())
            for s in layouts[rank].own_rank_sets
        ]
        norm = round_norm(sum_totals(totals, 2.0), 2.0, torch.float32)
        own = [partial_of(r, s).value for s in model.rank_sets(rank) for r in s]
        assert_rounds_sqrt(norm, sum(map(Fraction, own)))
        assert wire.decode_header(total[: wire.header_numel].tolist(), stamp=5) == Votes()
    print(  # noqa: T201 - figures for the README, shown by pytest -s
        f"\n{num_ranks} ranks, {len(expected)} lanes: exchange {exchange_bytes} bytes, "
        f"merged in {seconds * 1e3:.1f} ms of a rank's time, buffer {buffer_bytes} bytes, "
        f"packed in {pack_seconds * 1e3:.1f} ms"
    )


def partial_of(rank: int, rank_set: RankSet) -> PartialNorm:
    return PartialNorm(math.pi ** (rank % 17 - 8) * (1 + len(rank_set)))


def pack_all(model: Model, layouts: list[Layout], wire: WireFormat) -> tuple[torch.Tensor, float]:
    """Return every rank's buffer, [rank, numel] float32, and the mean seconds of making one."""
    start = time.perf_counter()
    packed: list[array[float]] = []
    for rank, layout in enumerate(layouts):
        own = {s: partial_of(rank, s) for s in model.rank_sets(rank)}
        packed.append(wire.pack(Votes(), 5, [own.get(s) for s in layout.lane_of]))
    seconds = (time.perf_counter() - start) / len(layouts)
    return torch.stack([torch.frombuffer(p, dtype=torch.float32) for p in packed]), seconds
