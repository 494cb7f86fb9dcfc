"""Random cases for the clip: one seed draws ranks, meshes, placements, gradients and faults.

A case is plain data, so that the ranks build its gradients and the test its expectation from the
same description, neither from the other.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["Case", "DrawnMesh", "DrawnParameter", "Fault", "Step", "draw_case"]

_MOST_RANKS = 8
_DTYPES = [torch.float32] * 5 + [torch.bfloat16] * 3 + [torch.float16] * 2
_RARE_DTYPES = [torch.float64, torch.complex64, torch.complex128]
_NORM_TYPES = [2.0, 2.0, 2.0, 1.0, math.inf, math.inf, -math.inf, 0.0, 3.0, 0.5]
_MAX_NORMS = [1.0, 1.0, 1e-3, 7.0, 1e6, 0.0, math.inf]
_MAGNITUDES = ["normal", "normal", "tiny", "huge", "mixed", "integers", "zeros"]


@dataclass(frozen=True)
class DrawnMesh:
    """A device mesh: its shape, and its global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        places = itertools.product(*map(range, self.shape))
        return dict(zip(self.ranks, places, strict=True)).get(rank)

    def through(self, rank: int, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks whose coordinate differs from that of `rank` along `axes` at most."""
        own = self.coordinate(rank)
        assert own is not None
        return tuple(
            other
            for other in self.ranks
            if all(
                i in axes or a == b
                for i, (a, b) in enumerate(zip(own, self.coordinate(other) or (), strict=True))
            )
        )


@dataclass(frozen=True)
class DrawnParameter:
    """One parameter: without a mesh it is a plain tensor, held by all ranks alike."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    magnitude: str
    mesh: DrawnMesh | None = None
    placements: tuple[Placement, ...] = ()
    on_host: bool = True
    as_main_grad: bool = False

    def axes(self, *kinds: type[Placement]) -> list[int]:
        return [i for i, placement in enumerate(self.placements) if isinstance(placement, kinds)]

    @property
    def is_partial(self) -> bool:
        """Whether its gradient waits for a sum over several ranks."""
        return any(self.mesh.shape[i] > 1 for i in self.axes(Partial)) if self.mesh else False

    def full_grad(self, seed: int, addend: tuple[int, ...] = ()) -> torch.Tensor:
        """Return the full gradient; of a Partial one, the addend of these places on its axes."""
        return _values(self, seed, addend)

    def local_grad(self, seed: int, rank: int) -> torch.Tensor:
        """Return this rank's shard of the gradient that `seed` gives; empty outside the mesh."""
        place = self.mesh.coordinate(rank) if self.mesh else ()
        if place is None:
            return torch.empty(0, dtype=self.dtype)
        addend = tuple(place[i] for i in self.axes(Partial))
        shard = self.full_grad(seed, addend)
        # _StridedShard cuts what the axes to its right have cut already.
        order = sorted(range(len(place)), key=lambda i: i in self.axes(_StridedShard))
        for axis in order:
            placement = self.placements[axis]
            if isinstance(placement, (Shard, _StridedShard)):
                assert self.mesh is not None
                shard = _cut(shard, placement.dim, self.mesh.shape[axis], place[axis])
        return shard.contiguous()


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank of a step.

    Attributes:
        rank: The rank.
        kind: `iterable` (the list of parameters raises), `max_norm` (a negative one), `norm_type`
            (another than the others') or `nan` (in a gradient, with error_if_nonfinite).
    """

    rank: int
    kind: str


@dataclass(frozen=True)
class Step:
    """One clip.

    Attributes:
        seed: Of the gradients' values.
        holders: By parameter, the ranks that have its gradient.
        listers: By parameter, the ranks whose list holds it.
        fault: None on most.
    """

    seed: int
    norm_type: float
    max_norm: float
    holders: tuple[frozenset[int], ...]
    listers: tuple[frozenset[int], ...]
    fault: Fault | None = None

    def contributors(self, index: int) -> frozenset[int]:
        """Return the ranks that bring a shard of this parameter's gradient to the norm."""
        return self.holders[index] & self.listers[index]


@dataclass(frozen=True)
class Case:
    """A model on some of the ranks, clipped several times over one group.

    Attributes:
        seed: What it was drawn from.
        backend: `gloo` or `hccl`, of the group.
        ranks: Of the group; 2 to 8 of 8.
        with_model: Clip through `NormReducer(model)`, else through `NormReducer()`.
        shuffled: Every rank lists its parameters in an order of its own.
        foreach: As for `clip_grad_norm_`.
        reproducible: Alike.
    """

    seed: int
    backend: str
    ranks: tuple[int, ...]
    parameters: tuple[DrawnParameter, ...]
    steps: tuple[Step, ...]
    with_model: bool
    shuffled: bool
    foreach: bool
    reproducible: bool

    def local_grad(self, step: Step, index: int, rank: int) -> torch.Tensor:
        """Return this rank's shard of a parameter's gradient in a step."""
        shard = self.parameters[index].local_grad(step.seed + index, rank)
        if step.fault and rank == step.fault.rank and index == self.poisoned(step):
            shard.view(-1)[-1] = math.nan
        return shard

    def poisoned(self, step: Step) -> int | None:
        """Return the parameter in which a step's fault puts a NaN; there may be none that can."""
        if step.fault is None or step.fault.kind != "nan" or step.norm_type == 0.0:
            return None
        return next(
            (
                index
                for index, parameter in enumerate(self.parameters)
                if step.fault.rank in step.contributors(index)
                and not parameter.is_partial
                and parameter.local_grad(step.seed + index, step.fault.rank).numel() > 0
            ),
            None,
        )


def draw_case(seed: int, backend: str) -> Case:
    """Return the case of a seed; the backend changes only where gradients may live."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 3, 4, 4, 5, 6, 8, 8])
    ranks = tuple(sorted(rng.sample(range(_MOST_RANKS), num_ranks)))
    meshes = [_draw_mesh(rng, ranks) for _ in range(rng.randint(1, 3))]
    parameters = tuple(_draw_parameter(rng, meshes, backend) for _ in range(rng.randint(1, 5)))
    with_model = rng.random() < 0.5
    reproducible = rng.random() < 0.2 and {p.dtype for p in parameters} <= set(_DTYPES)
    # Without names the ranks of a sum find each other's addends by their place in the list.
    by_place = any(p.is_partial for p in parameters) and not with_model
    return Case(
        seed=seed,
        backend=backend,
        ranks=ranks,
        parameters=parameters,
        steps=tuple(
            _draw_step(rng, ranks, parameters, filtered=not by_place, reproducible=reproducible)
            for _ in range(rng.randint(2, 4))
        ),
        with_model=with_model,
        shuffled=not by_place and rng.random() < 0.3,
        foreach=rng.random() < 0.8,
        reproducible=reproducible,
    )


def _draw_mesh(rng: random.Random, ranks: tuple[int, ...]) -> DrawnMesh:
    """Draw a mesh of 1 to 3 axes over all of the ranks or, at times, over some."""
    size = len(ranks) if rng.random() < 0.8 else rng.randint(1, len(ranks))
    members = sorted(rng.sample(ranks, size))
    if rng.random() < 0.3:
        rng.shuffle(members)
    num_axes = rng.choice([1, 2, 3])
    shapes = [
        shape
        for shape in itertools.product(range(1, size + 1), repeat=num_axes)
        if math.prod(shape) == size
    ]
    fewest_ones = min(shape.count(1) for shape in shapes)
    cut = [shape for shape in shapes if shape.count(1) == fewest_ones]
    return DrawnMesh(rng.choice(cut if rng.random() < 0.7 else shapes), tuple(members))


def _draw_parameter(rng: random.Random, meshes: list[DrawnMesh], backend: str) -> DrawnParameter:
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 7, 8, 9]) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.08:
        shape = (*shape[1:], 0)
    mesh = rng.choice([*meshes, *meshes, None])
    placements = _draw_placements(rng, len(mesh.shape), len(shape)) if mesh else ()
    is_partial = any(isinstance(placement, Partial) for placement in placements)
    dtype = rng.choice(_RARE_DTYPES) if rng.random() < 0.12 else rng.choice(_DTYPES)
    return DrawnParameter(
        shape=shape,
        dtype=torch.float32 if is_partial and dtype.is_complex else dtype,
        # The group adds in float32, which is exact for small integers.
        magnitude="integers" if is_partial else rng.choice(_MAGNITUDES),
        mesh=mesh,
        placements=placements,
        on_host=backend == "gloo" or rng.random() < 0.8,
        as_main_grad=rng.random() < 0.1,
    )


def _draw_placements(rng: random.Random, num_axes: int, num_dims: int) -> tuple[Placement, ...]:
    if rng.random() < 0.12:
        partial = Partial(rng.choice(["sum", "avg"]))
        choices = [partial, partial, Replicate(), Shard(rng.randrange(num_dims))]
        return tuple(rng.choice(choices) for _ in range(num_axes))
    drawn: list[Placement] = [
        Replicate() if rng.random() < 0.35 else Shard(rng.randrange(num_dims))
        for _ in range(num_axes)
    ]
    for left, right in itertools.pairwise(range(num_axes)):
        if drawn[left] == drawn[right] != Replicate() and rng.random() < 0.5:
            drawn[left] = _StridedShard(drawn[right].dim, split_factor=2)
            break
    return tuple(drawn)


def _draw_step(
    rng: random.Random,
    ranks: tuple[int, ...],
    parameters: tuple[DrawnParameter, ...],
    *,
    filtered: bool,
    reproducible: bool,
) -> Step:
    norm_type = 2.0 if reproducible else rng.choice(_NORM_TYPES)
    full = rng.random() < 0.5  # every gradient there and listed

    def some() -> frozenset[int]:
        return frozenset(rank for rank in ranks if full or rng.random() < 0.75)

    holders = tuple(some() for _ in parameters)
    listers = tuple(some() if filtered else frozenset(ranks) for _ in parameters)
    step = Step(
        seed=rng.randrange(1 << 40),
        norm_type=norm_type,
        max_norm=rng.choice(_MAX_NORMS),
        holders=holders,
        listers=listers,
    )
    if rng.random() < 0.12:
        kind = rng.choice(["iterable", "max_norm", "norm_type", "nan"])
        fault = Fault(rng.choice(ranks), kind)
        return replace(step, fault=fault)
    return step


def _values(parameter: DrawnParameter, seed: int, addend: tuple[int, ...]) -> torch.Tensor:
    """Draw the full gradient."""
    which = sum(place << 3 * (n + 1) for n, place in enumerate(addend))
    generator = torch.Generator().manual_seed(seed + (which << 40))

    def normal() -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    real = normal()
    x = torch.complex(real, normal()) if parameter.dtype.is_complex else real
    narrow = parameter.dtype == torch.float16
    if parameter.magnitude == "tiny":
        x *= 1e-5 if narrow else 1e-25
    elif parameter.magnitude == "huge":
        x *= 1e3 if narrow else 1e20
    elif parameter.magnitude == "mixed":
        x *= 10.0 ** ((2 if narrow else 8) * normal().clamp(-2, 2) / 2)
    elif parameter.magnitude == "integers":
        x = torch.view_as_real(x).mul_(3).round_() if x.is_complex() else x.mul_(3).round_()
        x = torch.view_as_complex(x) if parameter.dtype.is_complex else x
    elif parameter.magnitude == "zeros":
        x *= 0.0
    return x.to(parameter.dtype)


def _cut(tensor: torch.Tensor, dim: int, num_pieces: int, piece: int) -> torch.Tensor:
    """Return one of the pieces of torch.chunk, whose last ones may be smaller or empty."""
    length = tensor.shape[dim]
    size = -(-length // num_pieces)
    start = min(piece * size, length)
    return tensor.narrow(dim, start, min(size, length - start))
