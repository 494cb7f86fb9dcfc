"""Random models on random ranks against an exact reference, some faults among them.

All draws run on the same eight ranks, each on a group of its own of 2 to 8 of them, while the
others do nothing. A seed gives the same case wherever it runs: repeat one that failed by its
test's id, `pytest ...::test_drawn_case_has_the_exact_norm[hccl-117]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.case_runner import Outcome, assert_all_are_right, assert_all_raise_alike, clip_case
from tests.drawn_cases import Case, Step, draw_case
from tests.ranks import RankPool

NUM_RANKS = 8
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWS = [("gloo", seed) for seed in range(100)] + [("hccl", seed) for seed in range(100, 200)]
MORE_DRAWS = [(backend, seed) for backend in ("gloo", "hccl") for seed in range(200, 400)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    # A group of either backend can be made of the ranks of this one.
    pool = RankPool(NUM_RANKS, backend="hccl", group_timeout_s=10)
    yield pool
    pool.close()


@pytest.mark.simnpu
@pytest.mark.parametrize(
    ("backend", "seed"),
    [*DRAWS, *(pytest.param(*draw, marks=pytest.mark.slow) for draw in MORE_DRAWS)],
)
def test_drawn_case_has_the_exact_norm(pool, backend, seed):
    case = draw_case(seed, backend)
    print(case)  # noqa: T201 - pytest shows it if the test fails
    by_rank = dict(enumerate(pool.run(clip_case, case, timeout_s=20)))
    for number, step in enumerate(case.steps):
        outcomes = {rank: by_rank[rank][number] for rank in case.ranks}
        if step.fault and (step.fault.kind != "nan" or case.poisoned(step) is not None):
            assert_all_raise_alike(case, step, outcomes)
        else:
            assert_all_are_right(case, step, outcomes)
            assert_cost_is_least(case, number, outcomes)


@pytest.mark.simnpu
@pytest.mark.triton
@pytest.mark.parametrize(
    "seed",
    [*range(1000, 1015), *(pytest.param(s, marks=pytest.mark.slow) for s in range(1015, 1200))],
)
def test_drawn_case_on_devices_has_the_exact_norm(pool, seed):
    """Frozen, where no gradient is Partial and no group is of one rank."""
    case = on_devices(draw_case(seed, "hccl"))
    print(case)  # noqa: T201
    by_rank = dict(enumerate(pool.run(clip_case, case, timeout_s=30)))
    for number, step in enumerate(case.steps):
        assert_all_are_right(case, step, {rank: by_rank[rank][number] for rank in case.ranks})


def on_devices(case: Case) -> Case:
    """Return a case without faults that the device kernels can take, all of it."""
    parameters = (
        replace(p, on_host=False, dtype=p.dtype if p.dtype in KERNEL_DTYPES else torch.float32)
        for p in case.parameters
    )
    steps = (
        replace(step, fault=None, norm_type=step.norm_type if step.norm_type > 0.5 else 1.0)
        for step in case.steps
    )
    return replace(
        case,
        parameters=tuple(parameters),
        steps=tuple(steps),
        with_model=True,
        foreach=True,
        reproducible=False,
    )


def assert_cost_is_least(case: Case, number: int, outcomes: dict[int, Outcome]) -> None:
    """Assert one copy up, all-reduce, copy down and wait, where nothing asks for more."""
    moves = 0 if case.backend == "gloo" else 1
    for outcome in outcomes.values():
        assert outcome.counted in (None, outcome.copies)
        if needs_no_exchange(case, number):
            assert outcome.copies == (moves, 1, moves, moves)


def needs_no_exchange(case: Case, number: int) -> bool:
    step = case.steps[number]
    contributing = [i for i in range(len(case.parameters)) if step.contributors(i)]
    on_device = any(not case.parameters[i].on_host for i in contributing)
    partial = any(case.parameters[i].is_partial for i in contributing)
    wide = any(case.parameters[i].dtype in (torch.float64, torch.complex128) for i in contributing)
    known = set.union(set(), *(_rank_sets(case, earlier) for earlier in case.steps[:number]))
    known |= _rank_sets(case, None) if case.with_model else set()
    agreed = number > 0 or case.with_model
    return (
        agreed
        and not on_device
        and not partial
        and not (wide and math.isinf(step.norm_type))
        and _rank_sets(case, step) <= known
    )


def _rank_sets(case: Case, step: Step | None) -> set[tuple[int, ...]]:
    """Return the rank sets that the ranks bring to a step; for None, those of the whole model."""
    if step and step.fault and step.fault.kind != "nan":
        return set()
    found = set()
    for index, parameter in enumerate(case.parameters):
        mesh = parameter.mesh
        bring = case.ranks if step is None else step.contributors(index)
        for rank in bring if mesh else ():
            if mesh.coordinate(rank) is not None:
                distinct = parameter.axes(Shard, _StridedShard, Partial)
                found.add(tuple(sorted(mesh.through(rank, distinct))))
    return {rank_set for rank_set in found if len(rank_set) > 1}
