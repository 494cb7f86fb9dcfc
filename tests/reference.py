"""Exact references: sums as fractions, rounding checked by comparison of powers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.drawn_cases import Case, Step


def exact_pow_sum(tensors: Iterable[torch.Tensor], p: int = 2) -> Fraction:
    """Return sum(|x|^p) of all elements without any rounding; p a positive integer."""
    total = Fraction(0)
    for tensor in tensors:
        if tensor.is_complex():
            assert p == 2
            tensor = torch.view_as_real(tensor)
        for value in tensor.detach().double().flatten().tolist():
            total += abs(Fraction(value)) ** p
    return total


def assert_rounds_sqrt(norm: torch.Tensor, pow_sum: Fraction) -> None:
    """Assert that `norm` is sqrt(pow_sum) rounded to nearest in its own dtype."""
    value = Fraction(norm.item())
    below, above = (
        Fraction(torch.nextafter(norm, torch.full_like(norm, toward)).item())
        for toward in (-math.inf, math.inf)
    )
    low, high = (value + below) / 2, (value + above) / 2
    assert low <= 0 or low**2 <= pow_sum, f"{norm.item()!r} is too large"
    assert pow_sum <= high**2, f"{norm.item()!r} is too small"


def error_in_ulp(norm: torch.Tensor, reference: float) -> float:
    """Return |norm - reference| in units of the last place of `reference` in norm's dtype."""
    rounded = torch.tensor(reference, dtype=norm.dtype)
    ulp = torch.nextafter(rounded, torch.tensor(math.inf, dtype=norm.dtype)) - rounded
    return abs(norm.item() - reference) / ulp.item()


def elements_of_norm(case: Case, step: Step, rank: int) -> list[torch.Tensor]:
    """Return the elements of the vector whose norm this rank's clip must return, uncombined.

    Of every parameter: the shards of all ranks along the axes that hold distinct elements, those
    of a Partial gradient added up over the ranks that have an addend; without a mesh, or outside
    it, what this rank holds itself.
    """
    elements = []
    for index, parameter in enumerate(case.parameters):
        contributors = step.contributors(index)
        mesh = parameter.mesh
        if mesh is None or mesh.coordinate(rank) is None:
            elements += [case.local_grad(step, index, rank)] if rank in contributors else []
            continue
        summed = parameter.axes(Partial)
        distinct = summed + parameter.axes(Shard, _StridedShard)
        sums = {mesh.through(other, summed) for other in mesh.through(rank, distinct)}
        for addends in sums:
            shards = [case.local_grad(step, index, r) for r in addends if r in contributors]
            if not shards:
                continue
            if len(addends) == 1:
                elements.append(shards[0])
                continue
            total = torch.stack(shards).double().sum(0)
            is_average = any(parameter.placements[i] == Partial("avg") for i in summed)
            elements.append(total / len(addends) if is_average else total)
    return elements


def assert_is_norm(
    norm: torch.Tensor, elements: Iterable[torch.Tensor], p: float, *, relative: float
) -> None:
    """Assert that `norm` is within half a unit in its last place, and `relative`, of the norm.

    Args:
        norm: 0-dim float32 or float64.
        elements: Real or complex tensors.
        p: Any order >= 0, inf or -inf.
        relative: Error allowed beside the rounding of the result.
    """
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in elements]
    values = [value for tensor in wide for value in tensor.flatten().tolist()]
    got = norm.item()
    if p != 0.0 and any(value != value for value in values):
        assert math.isnan(got), f"{got!r}, where a gradient is NaN"
        return
    if p > 0.0 and any(map(math.isinf, map(abs, values))):
        assert got == math.inf, f"{got!r}, where a gradient is infinite"
        return
    is_complex = any(tensor.is_complex() for tensor in wide)
    if p == 2.0:
        parts = [t if not t.is_complex() else torch.view_as_real(t) for t in wide]
        exact, order = exact_pow_sum(parts), 2
    elif p in (1.0, 3.0) and not is_complex:
        exact, order = exact_pow_sum(wide, int(p)), int(p)
    else:
        exact, order = _norm_as_float(list(map(abs, values)), p), 1
        relative += 0.0 if p in (0.0, math.inf, -math.inf) and not is_complex else 2.0**-44
    if exact == math.inf:
        assert got == math.inf
        return
    if got == math.inf:
        largest = torch.finfo(norm.dtype).max
        beyond = Fraction(largest) * (1 + Fraction(torch.finfo(norm.dtype).eps) / 4)
        assert exact * (1 + Fraction(relative)) >= beyond**order, "inf, where the norm is finite"
        return
    assert math.isfinite(got), f"{got!r}, where the norm is finite"
    below, above = (
        torch.nextafter(norm, torch.full_like(norm, toward)).item()
        for toward in (-math.inf, math.inf)
    )
    low = (Fraction(got) + Fraction(below)) / 2 * (1 - Fraction(relative))
    high = (Fraction(got) + Fraction(above)) / 2 * (1 + Fraction(relative))
    assert low <= 0 or low**order <= exact, f"{got!r} is too large for a norm of order {p}"
    assert exact <= high**order, f"{got!r} is too small for a norm of order {p}"


def _norm_as_float(magnitudes: list[float], p: float) -> Fraction | float:
    if p == 0.0:
        return Fraction(sum(m != 0.0 for m in magnitudes))
    if p == math.inf:
        return Fraction(max(magnitudes, default=0.0))
    if p == -math.inf:
        return Fraction(min(magnitudes)) if magnitudes else math.inf
    return Fraction(math.fsum(m**p for m in magnitudes) ** (1.0 / p))
