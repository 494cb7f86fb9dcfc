"""Who measures and scales host tensors, and what the right results are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from hyper_parallel.kernels import host

__all__ = [
    "OURS",
    "PROVIDERS",
    "Provider",
    "TensorSet",
    "exact_inf_norm",
    "exact_norm",
    "validate_exact_sum",
    "verify_scaling",
]

OURS = "hyper_parallel"
FACTOR = 0.99  # a few dozen times in a run: float16 stays within its range
# What torch.nn.utils' own clipping calls.
FOREACH_NORM = torch._foreach_norm  # noqa: SLF001
FOREACH_MUL_ = torch._foreach_mul_


@dataclass(frozen=True)
class TensorSet:
    """Tensors of one layout, and the table that the kernels take."""

    tensors: list[torch.Tensor]
    table: host.TensorTable


@dataclass(frozen=True)
class Provider:
    """Someone who does an operation.

    Attributes:
        run: What is timed.
        value: Turns what `run` returned into the norm of all tensors; None for scaling.
    """

    name: str
    run: Callable[[TensorSet], Any]
    value: Callable[[Any], float] | None = None


def exact_sum(tensors: TensorSet) -> Fraction:
    """Return the sum of squares."""
    units = sum(part.units for part in host.exact_sums_of_squares(tensors.table))
    return Fraction(units, 1 << -host.EXACT_EXPONENT)


def validate_exact_sum(tensors: TensorSet) -> None:
    """Check the sum that all else is compared with against torch's, in float64."""
    chunks = (chunk for t in tensors.tensors for chunk in torch.split(t, 1 << 16))
    plain = math.fsum(float(torch.dot(c, c)) for c in map(torch.Tensor.double, chunks))
    exact = float(exact_sum(tensors))
    if abs(exact / plain - 1) > 1e-12:
        raise AssertionError(f"the exact sum {exact} is not {plain}")


def exact_norm(tensors: TensorSet) -> Fraction:
    """Return the 2-norm, to 2^-100."""
    return Fraction(math.isqrt(int(exact_sum(tensors) * 2**200)), 2**100)


def exact_inf_norm(tensors: TensorSet) -> Fraction:
    """Return the largest magnitude, from the extremes that torch finds."""
    extremes = (torch.aminmax(tensor) for tensor in tensors.tensors)
    return Fraction(max(max(-low.item(), high.item()) for low, high in extremes))


def verify_scaling(provider: Provider, tensor: torch.Tensor) -> float:
    """Return the largest relative error of a scaled element; ours must be rounded once."""
    part = tensor[: 1 << 16].clone()
    factor = torch.tensor(FACTOR, dtype=torch.float32)
    expected = (part.float() * factor).to(part.dtype)
    provider.run(TensorSet([part], host.pack([part])))
    if provider.name == OURS and not torch.equal(part, expected):
        raise AssertionError(f"scaling {part.dtype} rounds more than once")
    relative = (part.double() / expected.double() - 1).abs()
    return float(relative[expected != 0].max())


def torch_norm(parts: Sequence[torch.Tensor]) -> float:
    """Return the norm of norms as torch.nn.utils does, in the dtype that they came in."""
    return float(torch.linalg.vector_norm(torch.stack(list(parts))))


def torch_inf_norm(parts: Sequence[torch.Tensor]) -> float:
    """Return the largest of the norms."""
    return float(torch.stack(list(parts)).max())


def our_norm(norms: host.HostNorms) -> float:
    """Return the norm that sums of squares make."""
    return math.sqrt(math.fsum(norms.sums_of_squares))


def our_inf_norm(norms: host.HostNorms) -> float:
    """Return the largest magnitude."""
    return float(max(norms.max_abs))


def our_exact_norm(sums: host.ExactSums) -> float:
    """Return the norm that exact sums make."""
    units = sum(part.units for part in sums)
    return math.ldexp(math.sqrt(units >> 128), (host.EXACT_EXPONENT + 128) // 2)


def per_tensor(function: Callable[[torch.Tensor], object]) -> Callable[[TensorSet], object]:
    """Return a loop over the tensors."""
    return lambda s: [function(tensor) for tensor in s.tensors]


INF = math.inf
F32 = torch.float32
PROVIDERS = {
    "norm": [
        Provider(OURS, lambda s: host.partial_norms(s.table, 2.0), our_norm),
        Provider("torch.linalg.vector_norm", per_tensor(torch.linalg.vector_norm), torch_norm),
        Provider("torch._foreach_norm", lambda s: FOREACH_NORM(s.tensors), torch_norm),
        Provider(
            "torch._foreach_norm(dtype=float32)",
            lambda s: FOREACH_NORM(s.tensors, 2, dtype=F32),
            torch_norm,
        ),
    ],
    "inf_norm": [
        Provider(OURS, lambda s: host.partial_norms(s.table, INF), our_inf_norm),
        Provider(
            "torch.linalg.vector_norm",
            per_tensor(lambda t: torch.linalg.vector_norm(t, INF)),
            torch_inf_norm,
        ),
        Provider("torch._foreach_norm", lambda s: FOREACH_NORM(s.tensors, INF), torch_inf_norm),
    ],
    "exact_norm": [
        Provider(OURS, lambda s: host.exact_sums_of_squares(s.table), our_exact_norm),
    ],
    "scale": [
        Provider(OURS, lambda s: host.scale_(s.table, FACTOR)),
        Provider("torch._foreach_mul_", lambda s: FOREACH_MUL_(s.tensors, FACTOR)),
        Provider("torch.mul_", per_tensor(lambda t: t.mul_(FACTOR))),
    ],
}
