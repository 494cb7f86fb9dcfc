"""Kimi-K2's parameter list, at 1/4096 of its size, on 128 forked ranks.

Gradients are small integers, so that the exact norm is a sum of integers. Some minutes on 2 cores,
most of them for making the gradients: `make test-slow`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from benchmarks.shard_sizes import kimi_k2_shapes
from hyper_parallel import NormReducer
from hyper_parallel.platform.torch import reduction_groups
from hyper_parallel.testing import simnpu
from tests.ranks import RankPool
from tests.reference import assert_rounds_sqrt
from tests.sharding import dtensor_of_shard, groupless_mesh

pytestmark = [pytest.mark.slow, pytest.mark.simnpu, pytest.mark.timeout(600)]

NUM_RANKS = 128
SHAPES = kimi_k2_shapes(narrow=64)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Where a parameter lives: a mesh, its global ranks in row-major order, and placements."""

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    ranks: range = range(NUM_RANKS)


def fsdp_and_ep(index: int, rank: int) -> Spec:
    """FSDP-128 for what is dense; 128 ranks with 3 experts each."""
    del index, rank
    return Spec((128,), (Shard(0),))


def hsdp(index: int, rank: int) -> Spec:
    del index, rank
    return Spec((8, 16), (Replicate(), Shard(0)))


def tp_and_fsdp(index: int, rank: int) -> Spec:
    """TP 4 inside FSDP 32; norm weights are replicated over TP."""
    del rank
    is_matrix = len(SHAPES[index]) > 1
    return Spec((32, 4), (Shard(0), Shard(1) if is_matrix else Replicate()))


def pp_and_fsdp(index: int, rank: int) -> Spec | None:
    """Four stages of 32 ranks; None for a parameter of another stage."""
    stage = index * 4 // len(SHAPES)
    ranks = range(32 * stage, 32 * stage + 32)
    return Spec((32,), (Shard(0),), ranks) if rank in ranks else None


LAYOUTS = {
    "fsdp128-ep128": fsdp_and_ep,
    "hsdp8x16": hsdp,
    "tp4-fsdp32": tp_and_fsdp,
    "pp4-fsdp32": pp_and_fsdp,
}
# Lanes, bytes of the buffer, bytes of the agreement at set-up: the README's table.
SIZES = {
    "fsdp128-ep128": (1, 608, 4_612),
    "hsdp8x16": (8, 4_136, 4_612),
    "tp4-fsdp32": (1 + 4, 2_624, 7_172),
    "pp4-fsdp32": (4, 2_120, 9_220),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw of a clip."""

    total_norm: torch.Tensor
    counted: list[int]
    num_lanes: int
    buffer_bytes: int
    seconds: float
    exchange_bytes: int


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(NUM_RANKS, backend="hccl", group_timeout_s=400)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def sum_of_squares() -> int:
    @functools.cache
    def of_one(shape: tuple[int, ...], kind: int) -> int:
        return int(integers(shape, kind, [range(size) for size in shape]).square().sum())

    return sum(of_one(shape, kind_of(index)) for index, shape in enumerate(SHAPES))


@pytest.mark.parametrize("name", LAYOUTS)
def test_128_ranks_agree_on_the_exact_norm_in_one_all_reduce(pool, sum_of_squares, name):
    outcomes = pool.run(clip_layout, name, timeout_s=500)
    assert len({outcome.total_norm.item() for outcome in outcomes}) == 1
    assert_rounds_sqrt(outcomes[0].total_norm, Fraction(sum_of_squares))
    for outcome in outcomes:
        assert outcome.counted == [1, 1, 1, 1]
        sizes = outcome.num_lanes, outcome.buffer_bytes, outcome.exchange_bytes
        assert sizes == SIZES[name]
    first = outcomes[0]
    slowest = max(outcome.seconds for outcome in outcomes)
    print(  # noqa: T201 - figures for the README, shown by pytest -s
        f"\n{name}: {first.num_lanes} lane(s), buffer {first.buffer_bytes} bytes, agreed at set-up "
        f"with {first.exchange_bytes} bytes, slowest clip {slowest:.2f} s"
    )


def integers(shape: tuple[int, ...], kind: int, ranges: Sequence[range]) -> torch.Tensor:
    """Return a piece of a gradient of this shape: integers from -7 to 8, int32."""
    flat = torch.zeros((), dtype=torch.int32)
    stride = 1
    for dim in reversed(range(len(ranges))):
        places = torch.arange(ranges[dim].start, ranges[dim].stop, dtype=torch.int32)
        others = len(ranges) - 1 - dim
        flat = flat + (places * stride).reshape(-1, *[1] * others)
        stride *= shape[dim]
    return (flat * 613 + kind * 977 >> 4).bitwise_and_(15).sub_(7)


def kind_of(index: int) -> int:
    """Return which of three gradients of its shape a parameter has: making them takes longest."""
    return index % 3


@functools.cache
def shard_of(shape: tuple[int, ...], kind: int, spec: Spec, rank: int) -> torch.Tensor:
    ranges = [range(size) for size in shape]
    place_in_mesh = torch.tensor(spec.ranks.index(rank))
    places = torch.unravel_index(place_in_mesh, spec.mesh_shape)
    for placement, size, place in zip(spec.placements, spec.mesh_shape, places, strict=True):
        if isinstance(placement, Shard):
            whole = ranges[placement.dim]
            width = -(-len(whole) // size)
            ranges[placement.dim] = whole[int(place) * width : (int(place) + 1) * width]
    return integers(shape, kind, ranges).to(torch.bfloat16)


@functools.cache
def mesh_of(shape: tuple[int, ...], ranks: range) -> DeviceMesh:
    return groupless_mesh("npu", shape, ranks)


def stages_of(rank: int) -> dist.ProcessGroup:
    """Return the group of the ranks that stand where this one does in the four stages."""
    groups = [dist.new_group(list(range(place, NUM_RANKS, 32))) for place in range(32)]
    return groups[rank % 32]


def clip_layout(rank: int, name: str) -> Outcome:
    """Clip the model laid out so; check that this rank's shards are scaled."""
    reduction_groups._groups.clear()
    shard_of.cache_clear()
    specs = {index: LAYOUTS[name](index, rank) for index in range(len(SHAPES))}
    specs = {index: spec for index, spec in specs.items() if spec}
    model = torch.nn.ParameterDict()
    for index, spec in specs.items():
        shard = shard_of(SHAPES[index], kind_of(index), spec, rank).clone()
        zeros = torch.zeros((), dtype=shard.dtype).expand(shard.shape)  # no memory
        weight, grad = (
            dtensor_of_shard(
                local, SHAPES[index], mesh_of(spec.mesh_shape, spec.ranks), spec.placements
            )
            for local in (zeros, shard)
        )
        model[str(index)] = torch.nn.Parameter(weight, requires_grad=False)
        model[str(index)].grad = grad
    pp_group = stages_of(rank) if name == "pp4-fsdp32" else None
    simnpu.reset_counters()
    reducer = NormReducer(model, pp_group=pp_group)
    exchange_bytes = simnpu.counters()["collective_bytes"]
    simnpu.reset_counters()
    start = time.perf_counter()
    result = reducer.clip_(model, 1.0)
    seconds = time.perf_counter() - start
    counters = simnpu.counters()
    assert result.clip_coef < 1.0
    for index in [index for index in specs if index % 30 == 0]:
        before = shard_of(SHAPES[index], kind_of(index), specs[index], rank)
        scaled = before.float() * result.clip_coef
        assert torch.equal(model[str(index)].grad.to_local(), scaled.bfloat16())
    group = reduction_groups.resolve_group(None)
    return Outcome(
        total_norm=result.total_norm,
        counted=[counters[key] for key in ("h2d", "collectives", "d2h", "host_syncs")],
        num_lanes=len(group.layout.lane_of),
        buffer_bytes=4 * group.staging.numel,
        seconds=seconds,
        exchange_bytes=exchange_bytes,
    )
