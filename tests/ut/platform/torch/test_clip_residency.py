"""Inputs from public bug reports and beside them, on the host, on the device, and on both.

Each row of the table is clipped four times on the simulated NPU: with all gradients on the host,
every other one on the device, all of them, and all of them through `NormReducer(model)`, which then
freezes. Norms are compared with an exact reference, and norms and gradients bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.case_runner import Outcome, assert_all_are_right, clip_case
from tests.drawn_cases import Case, DrawnMesh, DrawnParameter, Step
from tests.ranks import RankPool

pytestmark = [pytest.mark.simnpu, pytest.mark.triton]

NUM_RANKS = 4
EVERYONE = frozenset(range(NUM_RANKS))
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF = math.inf

LINE, SQUARE = DrawnMesh((4,), (0, 1, 2, 3)), DrawnMesh((2, 2), (0, 1, 2, 3))
ACROSS = DrawnMesh((2, 2), (0, 2, 1, 3))
PAIR = DrawnMesh((2,), (1, 3))
HSDP = (Replicate(), Shard(0))

# Norm types that have kernels, and one that has none; a step each.
USUAL = ((2.0, 1.0), (1.0, 0.5), (INF, 1.0), (2.0, INF))
ALL_TYPES = (*USUAL, (3.0, 1.0), (0.0, 1.0), (-INF, 1.0), (0.5, 1.0))
ALL_LIMITS = ((2.0, 0.0), (2.0, 1.0), (2.0, 1e39), (INF, 1e39), (INF, INF))


@dataclass(frozen=True)
class Given(DrawnParameter):
    """A parameter with this gradient.

    Attributes:
        values: The full gradient.
        lacking: Ranks that have none.
        is_transposed: Whether shards have the strides of a transposed tensor.
    """

    values: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    lacking: frozenset[int] = frozenset()
    is_transposed: bool = False

    def full_grad(self, seed: int, addend: tuple[int, ...] = ()) -> torch.Tensor:
        return self.values[addend] if addend else self.values

    def local_grad(self, seed: int, rank: int) -> torch.Tensor:
        shard = super().local_grad(seed, rank).clone()  # steps write into it
        return shard.mT.contiguous().mT if self.is_transposed else shard


def grad(
    values: torch.Tensor,
    mesh: DrawnMesh | None = None,
    *placements: Placement,
    dtype: torch.dtype = F32,
    **options: object,
) -> Given:
    """Describe a parameter; without placements it is sharded along its first dimension."""
    is_partial = any(isinstance(placement, Partial) for placement in placements)
    placements = placements or ((Shard(0),) if mesh else ())
    values = values.to(dtype)
    shape = tuple(values.shape[1:] if is_partial else values.shape)
    return Given(shape, dtype, "given", mesh, placements, values=values, **options)


def numbers(*shape: int, times: float = 1.0) -> torch.Tensor:
    """Return times * (1, 2, 3...)."""
    return times * torch.arange(1.0, math.prod(shape) + 1).reshape(shape)


def full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def drawn(seed: int, *shapes: Sequence[int]) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(*shape) for shape in shapes]


def with_at(special: float, *places: int) -> torch.Tensor:
    """Return ones, 4 shards of 2 blocks and a tail each, with a special value at these places."""
    values = torch.ones(4 * 8195)
    values[list(places)] = special
    return values


def spread(seed: int, exponents: tuple[int, int]) -> torch.Tensor:
    """Return numbers of all magnitudes between two powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*exponents, (4, 150), generator=generator)
    return torch.ldexp(torch.randn(4, 150, generator=generator, dtype=torch.float64), sizes)


def dense(**options: object) -> Given:
    return grad(numbers(8, 4), LINE, **options)


def expert(**options: object) -> Given:
    return grad(numbers(4, 4, 4, times=3.0), SQUARE, Shard(0), Shard(1), **options)


@dataclass(frozen=True)
class Row:
    """What is clipped, and how.

    Attributes:
        grads: Makes the parameters.
        steps: Norm type and max_norm of each clip.
        norm: The right one for p = 2, where a report tells it.
        freezes: Whether a model of these, on its devices, can be clipped frozen at all.
    """

    grads: Callable[[], list[Given]]
    steps: Sequence[tuple[float, float]] = USUAL
    norm: float | None = None
    freezes: bool = True


def _unit_test_addends() -> list[torch.Tensor]:
    return drawn(5, *([(8, 16)] * 4))


ROWS: dict[str, Row] = {
    # Layouts.
    "pytorch#180346": Row(lambda: [dense(), expert()], ALL_TYPES, 903.549),
    "accelerate#4219": Row(lambda: [dense(), grad(full(50, 4))], ALL_TYPES, 146.424),
    "hyper-parallel#279": Row(
        lambda: [dense(), grad(full(50, 4), LINE, Replicate())], norm=146.424
    ),
    "TransformerEngine#715": Row(
        lambda: [grad(full(1, 4), LINE, Replicate()), grad(full(2, 8), LINE)], norm=6.0
    ),
    "VeOmni#184": Row(
        lambda: [grad(numbers(8, 4), SQUARE, *HSDP), grad(2 * numbers(4, 4), SQUARE, *HSDP)],
        norm=132.0,
    ),
    "unit test, seed 0": Row(
        lambda: [
            grad(a, mesh, *placements)
            for a, mesh, placements in zip(
                drawn(0, (8, 16), (8, 16)), (LINE, SQUARE), ((), HSDP), strict=True
            )
        ]
    ),
    "unit test, seed 2": Row(lambda: [grad(a, LINE) for a in drawn(2, (8, 16), (8, 16))]),
    "unit test, seed 3": Row(
        lambda: [
            grad(torch.cat(drawn(3, *([(2, 16)] * 4))), LINE),
            grad(drawn(4, (8, 16))[0], LINE, Replicate()),
        ]
    ),
    "unit test, seed 5: Partial": Row(
        lambda: [grad(torch.stack(_unit_test_addends()), LINE, Partial("sum"))],
        ((2.0, INF), (INF, 1.0)),
        freezes=False,
    ),
    "Partial beside shards": Row(
        lambda: [dense(), grad(numbers(4, 3, 5), LINE, Partial("sum")), expert()],
        freezes=False,
    ),
    "TP x FSDP": Row(
        lambda: [
            grad(numbers(8, 6), SQUARE, Shard(0), Shard(1)),
            grad(numbers(8), SQUARE, Shard(0), Replicate()),
            grad(numbers(9, 2), SQUARE, _StridedShard(0, split_factor=2), Shard(0)),
        ]
    ),
    "two meshes that cross": Row(
        lambda: [grad(numbers(6, 4), SQUARE, *HSDP), grad(numbers(6, 4), ACROSS, *HSDP)]
    ),
    "a mesh of some ranks": Row(lambda: [dense(), grad(numbers(5, 3), PAIR)]),
    "nothing is a DTensor": Row(lambda: [grad(numbers(7)), grad(numbers(5), dtype=BF16)]),
    "five small ones": Row(lambda: [grad(full(v, 4), LINE) for v in (1, 5, 3, 2, 4)]),
    # Which gradients there are.
    "Model-Optimizer#1621": Row(lambda: [dense(lacking={3})], norm=70.0),
    "expert lacking": Row(lambda: [dense(), expert(lacking={3})], norm=639.944),
    "each lacks another": Row(lambda: [dense(lacking={i, i + 1}) for i in range(3)]),
    "nobody has any": Row(lambda: [dense(lacking=EVERYONE), expert(lacking=EVERYONE)], ALL_TYPES),
    "fairscale#1167": Row(
        lambda: [dense(lacking=EVERYONE), grad(torch.tensor([3.0, 4.0]))], norm=5.0
    ),
    "torchrec#3809": Row(lambda: [grad(numbers(3, 2), LINE), dense()], ALL_TYPES),
    "DeepSpeed#5241": Row(
        lambda: [grad(torch.empty(0, 4), LINE), grad(numbers(2), LINE)], ALL_TYPES
    ),
    "all are empty": Row(lambda: [grad(torch.empty(0, 4), LINE), grad(torch.empty(0))]),
    "main_grad": Row(lambda: [dense(as_main_grad=True), expert(as_main_grad=True), dense()]),
    # How they lie in memory.
    "transposed": Row(
        lambda: [grad(numbers(8, 6), LINE, is_transposed=True), dense()], ALL_TYPES, freezes=False
    ),
    "unaligned": Row(lambda: [grad(numbers(n), dtype=F16) for n in (1, 3, 5)]),
    # Values.
    "pytorch#46849": Row(lambda: [grad(full(1e20, 100), LINE)], norm=1e21),
    "1e20 beside 1": Row(lambda: [grad(full(1e20, 100), LINE), dense()], ALL_LIMITS),
    "1e-25": Row(lambda: [grad(full(1e-25, 100), LINE), grad(full(3e-25, 100), LINE)], ALL_LIMITS),
    "beyond float32": Row(lambda: [grad(full(3e38, 100), LINE), grad(full(3e38, 5))], ALL_LIMITS),
    "all magnitudes": Row(lambda: [grad(spread(i, (-140, 110)), LINE) for i in range(3)]),
    "subnormal": Row(
        lambda: [grad(torch.ldexp(numbers(4, 9), torch.tensor(-149)), LINE), grad(full(1e-45, 3))],
        ALL_LIMITS,
    ),
    "subnormal norms": Row(lambda: [grad(spread(i, (-148, -131)), LINE) for i in range(2)]),
    "subnormal halves": Row(
        lambda: [grad(full(6e-8, 4, 9), LINE, dtype=F16), grad(full(1e-40, 7), LINE, dtype=BF16)]
    ),
    "torchtitan#4135": Row(
        lambda: [grad(full(v, n), LINE, dtype=BF16) for v, n in ((256, 4), (16, 64))], norm=527.758
    ),
    "fairscale#263": Row(lambda: [grad(full(300, 65536), LINE, dtype=F16)], norm=76800.0),
    "Megatron-LM#7338": Row(
        lambda: [grad(full(3, 1)), grad(full(4, 1), dtype=BF16)], ALL_LIMITS, norm=5.0
    ),
    "three dtypes": Row(
        lambda: [
            grad(a, LINE, dtype=d)
            for a, d in zip(drawn(6, (64, 3), (64, 5), (64, 7)), (F32, BF16, F16), strict=True)
        ],
        ALL_TYPES,
    ),
    "wide ones among them": Row(
        lambda: [dense(), grad(numbers(5) / 3, dtype=torch.float64), expert()],
        ALL_TYPES,
        freezes=False,
    ),
    "complex": Row(
        lambda: [grad(torch.tensor([3 + 4j]), dtype=torch.complex64), dense()], freezes=False
    ),
    "Megatron-LM#5395": Row(lambda: [grad(torch.tensor([3e7, 4e7]))], norm=5e7),
    "coefficient just 1": Row(
        lambda: [grad(torch.tensor([3.0, 4.0]))], [(2.0, 5.0), (2.0, 5.000001), (2.0, 4.9999995)]
    ),
    "zeros of both signs": Row(lambda: [grad(torch.tensor([0.0, -0.0] * 4), LINE)], ALL_LIMITS),
    # NaN and infinity: first, at the edges of shards and blocks, last.
    **{
        f"{special} at {place}": Row(
            lambda special=special, place=place: [grad(with_at(special, place), LINE), dense()],
            [(2.0, 1.0), (INF, 1.0), (1.0, INF)],
        )
        for special, place in (
            (math.nan, 0),
            (-INF, 8195 + 4095),
            (math.nan, 8195 + 4096),
            (INF, 4 * 8195 - 1),
        )
    },
    "NaN and infinity": Row(
        lambda: [grad(with_at(math.nan, 5), LINE), grad(with_at(INF, 9000), LINE)], ALL_LIMITS
    ),
    "NaN in what one rank holds whole": Row(
        lambda: [dense(), grad(torch.tensor([math.nan]), PAIR)], [(2.0, 1.0), (INF, 1.0)]
    ),
}


def case_of(row: Row, on_host: Callable[[int], bool], *, with_model: bool) -> Case:
    given = row.grads()
    holders = tuple(EVERYONE - grad.lacking for grad in given)
    listers = (EVERYONE,) * len(given)
    return Case(
        seed=0,
        backend="hccl",
        ranks=tuple(range(NUM_RANKS)),
        parameters=tuple(replace(grad, on_host=on_host(i)) for i, grad in enumerate(given)),
        steps=tuple(Step(0, p, max_norm, holders, listers) for p, max_norm in row.steps),
        with_model=with_model,
        shuffled=False,
        foreach=True,
        reproducible=False,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(NUM_RANKS, backend="hccl", group_timeout_s=10)
    yield pool
    pool.close()


def clip(pool: RankPool, case: Case) -> list[dict[int, Outcome]]:
    """Return what became of each step, by rank."""
    by_rank = pool.run(clip_case, case, timeout_s=30)
    return [dict(enumerate(outcomes)) for outcomes in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("name", ROWS)
def test_norm_and_gradients_have_the_same_bits_wherever_they_are(pool, name):
    row = ROWS[name]
    case = case_of(row, lambda _: True, with_model=False)
    on_host = clip(pool, case)
    for step, outcomes in zip(case.steps, on_host, strict=True):
        assert_all_are_right(case, step, outcomes)
    if row.norm is not None:
        for outcome in on_host[0].values():
            assert outcome.total_norm.item() == pytest.approx(row.norm, abs=0.51e-3, rel=1e-7)
    others = {
        "mixed": clip(pool, case_of(row, lambda i: i % 2 == 0, with_model=False)),
        "device": clip(pool, case_of(row, lambda _: False, with_model=False)),
    }
    if row.freezes:
        others["frozen"] = clip(pool, case_of(row, lambda _: False, with_model=True))
        for (norm_type, _), outcomes in zip(row.steps, others["frozen"], strict=True):
            waits = {outcome.counted[2:] for outcome in outcomes.values()}
            assert waits == {(0, 0)} or norm_type not in (2.0, 1.0, INF)
    for where, outcomes in others.items():
        for step, expected, ours in zip(row.steps, on_host, outcomes, strict=True):
            for rank, outcome in ours.items():
                assert_same_bits(outcome, expected[rank], f"{where}, {step}, rank {rank}")


def assert_same_bits(ours: Outcome, theirs: Outcome, where: str) -> None:
    assert ours.error is None, where
    pairs = [(ours.total_norm, theirs.total_norm), *zip(ours.grads, theirs.grads, strict=True)]
    for a, b in pairs:
        assert (a is None) == (b is None), where
        if a is not None:
            assert a.dtype == b.dtype, where
            assert a.nan_to_num(7.0).tolist() == b.nan_to_num(7.0).tolist(), where
            assert torch.equal(a.isnan(), b.isnan()), where
