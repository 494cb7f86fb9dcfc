"""Gradient shards to partial norms, and the scaling. The only module that knows kernels.

Host shards go through `kernels.host`, all in one call, device shards through `kernels.triton`, by
way of device_norms.py. What there are no kernels for is measured with torch operators, in chunks of
float64, in which every square of a float32, bfloat16 or float16 is exact:
`torch.linalg.vector_norm` accumulates long float32 tensors in float32 and is 0.5 % off at 64 Mi
elements (tests/ut/platform/torch/test_partial_norms.py).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hyper_parallel.kernels import host

from .chunks import DEVICE_CHUNK_NUMEL, HOST_CHUNK_NUMEL, chunk_numel, chunks
from .clip_result import Copies
from .device_norms import has_private_format, is_launchable, launch_norms, scale_on_device_
from .exact_fallback import exact_sum_of_squares
from .finish import GRID_EXPONENT
from .torch_private import foreach_mul_
from .wire_format import PartialNorm, PartialNorms

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["measure", "scale_"]

_Scale = Callable[[list[torch.Tensor], float], Copies | None]
_Way = tuple[_Scale, torch.device | None, torch.dtype | None]


def measure(
    tensors: Sequence[torch.Tensor],
    norm_type: float,
    *,
    reproducible: bool = False,
    are_plain: bool = False,
) -> tuple[PartialNorms, Copies]:
    """Return the partial norm of each tensor, and what fetching those of device tensors cost.

    Device tensors are launched first, so that the device works while the host passes run.

    Args:
        tensors: Gradient shards of any shape, strides, floating or complex dtype and device.
        norm_type: Any p >= 0, inf or -inf.
        reproducible: Sum squares exactly, those of device tensors on the host; p = 2 only, and no
            float64.
        are_plain: All are known to be on the CPU, strided and contiguous.

    Accuracy: a host sum of n terms has a relative error below (n / 2^16 + 2^16) * 2^-53, whatever
    the dtype; on a device alike, if it has float64. Where it has none, sums are float32 over
    chunks scaled by the largest element.

    Sync: one per device that holds shards the kernels take; one per device with others, two if some
    of those are not finite; one per 4 Mi elements on a device if reproducible.
    """
    if not reproducible and _all_fit_kernels(tensors, norm_type, are_plain=are_plain):
        return _measure_with_kernels(tensors, norm_type), Copies()
    dense = [_dense(tensor, norm_type) for tensor in tensors]
    if reproducible:
        partials, copies = _measure_exactly(dense)
    else:
        partials, copies = _measure_mixed(dense, norm_type)
    return PartialNorms.of(partials), copies


def _measure_mixed(
    dense: Sequence[torch.Tensor], norm_type: float
) -> tuple[list[PartialNorm], Copies]:
    on_host = [i for i, tensor in enumerate(dense) if tensor.is_cpu]
    by_kernels = launch_norms(dense, norm_type)
    taken = {i for indices, _ in by_kernels for i in indices}
    on_device = [i for i, tensor in enumerate(dense) if not tensor.is_cpu and i not in taken]
    launched = [_launch(dense[i], norm_type) for i in on_device]
    partials = dict(
        zip(on_host, _measure_on_host([dense[i] for i in on_host], norm_type), strict=True)
    )
    rows, copies = _fetch(launched)
    values = [_unscale(_combine_parts(row[1:], norm_type), row[0], norm_type) for row in rows]
    counted, count_copies = _to_partials(values, [dense[i] for i in on_device], norm_type)
    partials |= zip(on_device, counted, strict=True)
    copies += count_copies
    for indices, norms in by_kernels:
        fetched, fetch_copies = norms.fetch()
        partials |= zip(indices, fetched, strict=True)
        copies += fetch_copies
    return [partials[i] for i in range(len(dense))], copies


def scale_(
    tensors: Sequence[torch.Tensor], coef: float, *, foreach: bool, are_plain: bool = False
) -> Copies:
    """Multiply tensors in place, each in float32 arithmetic (float64 for float64) and rounded once.

    Args:
        tensors: Gradient shards; those on the host go through one call if `foreach`, and so do
            those of one dtype and device.
        coef: The clip coefficient.
        foreach: Whether to use multi-tensor kernels, else plain operators, one tensor at a time.
        are_plain: See `measure`.

    Returns:
        What it cost: copies up of tables, where device tensors were not those before.
    """
    copies = Copies()
    if foreach and are_plain and tensors and host.is_available():
        host.scale_(tensors, coef)
        return copies
    singly: list[torch.Tensor] = []
    groups: dict[_Way, list[torch.Tensor]] = {}
    for tensor in tensors:
        way = _way_of(tensor) if foreach else None
        (singly if way is None else groups.setdefault(way, [])).append(tensor)
    for tensor in singly:
        if tensor.dim() and tensor.layout == torch.strided:
            tensor.narrow(0, 0, 0).mul_(coef)  # nothing, but its class may refuse
    for way in sorted(groups, key=lambda way: way[1] is None):  # launches may fail: first
        copies += way[0](groups[way], coef) or Copies()
    for tensor in singly:
        tensor.mul_(coef)
    return copies


def _way_of(tensor: torch.Tensor) -> _Way | None:
    """Return what scales a tensor with others of its kind; None where only single operators do."""
    if tensor.is_cpu:
        return (host.scale_, None, None) if _fits_kernels(tensor) else None
    if is_launchable(tensor):
        return scale_on_device_, tensor.device, None
    if _foreach_rounds_once(tensor):
        return foreach_mul_, tensor.device, tensor.dtype
    return None


def _all_fit_kernels(tensors: Sequence[torch.Tensor], norm_type: float, *, are_plain: bool) -> bool:
    """Tell whether the kernels take all of them; checked a list at a time, since lists are long."""
    if not are_plain:
        are_plain = (
            all(map(_is_cpu, tensors))
            and set(map(_layout_of, tensors)) == {torch.strided}
            and all(map(torch.Tensor.is_contiguous, tensors))
        )
    return (
        are_plain
        and (norm_type == 2.0 or not any(map(torch.is_complex, tensors)))
        and bool(host.is_available())
    )


_is_cpu = operator.attrgetter("is_cpu")
_layout_of = operator.attrgetter("layout")


def _measure_on_host(tensors: Sequence[torch.Tensor], norm_type: float) -> list[PartialNorm]:
    """Measure host tensors, all that the kernels take in one call."""
    fits = [_fits_kernels(t) and (norm_type == 2.0 or not t.is_complex()) for t in tensors]
    at_once = list(itertools.compress(tensors, fits))
    others = [tensor for tensor, fit in zip(tensors, fits, strict=True) if not fit]
    values = [_host_value(tensor, norm_type) for tensor in others]
    measured = iter(_measure_with_kernels(at_once, norm_type) if at_once else ())
    by_operators = iter(_to_partials(values, others, norm_type)[0])
    return [next(measured) if fit else next(by_operators) for fit in fits]


def _measure_with_kernels(tensors: Sequence[torch.Tensor], norm_type: float) -> PartialNorms:
    norms = host.partial_norms(tensors, norm_type)
    if norm_type == 0.0:
        return PartialNorms(list(map(float, norms.num_nonzero)))
    columns = {2.0: "sums_of_squares", math.inf: "max_abs", -math.inf: "min_abs"}
    values: list[float] = getattr(norms, columns.get(norm_type, "pow_sums"))
    if all(map(math.isfinite, values)):
        return PartialNorms(values)
    counts = zip(values, norms.num_nan, norms.num_inf, strict=True)
    return PartialNorms.of(_to_partial(*counted, norm_type) for counted in counts)


def _fits_kernels(tensor: torch.Tensor) -> bool:
    """Tell whether there are kernels for a host tensor: its elements are dense, in any order."""
    if not host.is_available() or tensor.layout != torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _measure_exactly(tensors: Sequence[torch.Tensor]) -> tuple[list[PartialNorm], Copies]:
    """Sum squares exactly, of host tensors in one call, of others a piece at a time."""
    fits = [tensor.is_cpu and _fits_kernels(tensor) for tensor in tensors]
    at_once = list(itertools.compress(tensors, fits))
    measured = iter(host.exact_sums_of_squares(at_once) if at_once else ())
    partials: list[PartialNorm] = []
    num_fetched = 0
    for tensor, fit in zip(tensors, fits, strict=True):
        cut = [] if fit else chunks(tensor, chunk_numel(tensor))
        pieces = [next(measured)] if fit else list(map(_exact_sum_of_piece, cut))
        num_fetched += 0 if tensor.is_cpu or not tensor.numel() else len(pieces)
        partials.append(_to_exact_partial(pieces))
    return partials, Copies(d2h=num_fetched, host_syncs=num_fetched)


def _exact_sum_of_piece(piece: torch.Tensor) -> host.ExactSum:
    dense = piece.cpu().contiguous()
    if host.is_available():
        return next(iter(host.exact_sums_of_squares([dense])))
    return exact_sum_of_squares(dense)


def _to_exact_partial(pieces: Sequence[host.ExactSum]) -> PartialNorm:
    units = sum(piece.units for piece in pieces)
    num_nan = sum(piece.num_nan for piece in pieces)
    num_inf = sum(piece.num_inf for piece in pieces)
    if num_nan or num_inf:
        return PartialNorm(0.0, num_nan, num_inf)
    value = math.ldexp(float(units), host.EXACT_EXPONENT)
    return PartialNorm(value, grid_sum=units << host.EXACT_EXPONENT - GRID_EXPONENT)


def _foreach_rounds_once(tensor: torch.Tensor) -> bool:
    """Tell whether the multi-tensor kernel keeps the coefficient in float32.

    CUDA's does. Others may round it to bfloat16 and float16 gradients' own dtype first, as torch
    2.13's on the CPU does, which gains nothing over single operators anyway.
    """
    if tensor.layout != torch.strided or tensor.device.type == "cpu" or has_private_format(tensor):
        return False
    return tensor.device.type == "cuda" or tensor.dtype not in (torch.bfloat16, torch.float16)


def _dense(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return a dense tensor with the norm of this one: of a sparse one, what it stores."""
    if tensor.layout != torch.sparse_coo:
        return tensor
    values = tensor.coalesce().values().flatten()
    stores_all = values.numel() == tensor.numel()
    if stores_all or norm_type != -math.inf:
        return values
    return torch.cat([values, values.new_zeros(1)])  # the smallest is one that is not stored


def _to_partials(
    values: Sequence[float], tensors: Sequence[torch.Tensor], norm_type: float
) -> tuple[list[PartialNorm], Copies]:
    """Look at the elements of those whose value is not finite."""
    suspects = [i for i, value in enumerate(values) if not _is_finite(value, norm_type)]
    rows, copies = _fetch([_count_nonfinite(tensors[i]) for i in suspects])
    counts = {
        i: (int(num_nan), int(num_inf))
        for i, (num_nan, num_inf) in zip(suspects, rows, strict=True)
    }
    partials = [
        _to_partial(value, *counts.get(i, (0, 0)), norm_type) for i, value in enumerate(values)
    ]
    return partials, copies


def _to_partial(value: float, num_nan: int, num_inf: int, norm_type: float) -> PartialNorm:
    if _is_finite(value, norm_type):
        return PartialNorm(value)
    return PartialNorm(
        value=math.inf if norm_type == -math.inf else 0.0,
        num_nan=num_nan,
        num_inf=num_inf,
        overflows=not (num_nan or num_inf),
    )


def _is_finite(value: float, norm_type: float) -> bool:
    """Tell whether a value is a number; the least of nothing, or of infinities, counts as one."""
    return math.isfinite(value) or value == -norm_type == math.inf


def _count_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return [NaN elements, infinite elements] on the tensor's device."""
    rows = []
    for chunk in chunks(tensor, chunk_numel(tensor)):
        nan = chunk.isnan()
        rows.append(torch.stack([nan.sum(), (chunk.isinf() & ~nan).sum()]))
    return torch.stack(rows).sum(0)


def _wide(chunk: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return a chunk as flat float64: parts of complex numbers where p = 2, else magnitudes."""
    if chunk.is_complex():
        chunk = chunk.to(torch.complex128)
        chunk = torch.view_as_real(chunk.resolve_conj()) if norm_type == 2.0 else chunk.abs()
    return chunk.to(torch.float64, memory_format=torch.contiguous_format).reshape(-1)


def _host_value(tensor: torch.Tensor, norm_type: float) -> float:
    """Return the sum of |x|^p, the count of nonzeros, or the max or min of |x|; NaN stays NaN."""
    if tensor.numel() == 0:
        return math.inf if norm_type == -math.inf else 0.0
    pieces = chunks(tensor, HOST_CHUNK_NUMEL)
    parts = [float(_reduce_chunk(_wide(piece, norm_type), norm_type)) for piece in pieces]
    return _combine_parts(parts, norm_type)


def _reduce_chunk(x: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the 0-dim partial norm of a flat real chunk, in its own dtype."""
    if norm_type == 2.0:
        return torch.dot(x, x)
    if norm_type == 0.0:
        return x.count_nonzero().to(x.dtype)
    if norm_type == math.inf:
        return x.abs().max()
    if norm_type == -math.inf:
        return x.abs().min()
    return x.abs().pow_(norm_type).sum()


def _combine_parts(parts: list[float], norm_type: float) -> float:
    if any(math.isnan(part) for part in parts):
        return math.nan
    if math.isinf(norm_type):
        return max(parts) if norm_type > 0 else min(parts)
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def _launch(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return [scale, parts...] on the tensor's device; a part stands for part * scale^p.

    float64 where the device has it, with scale 1. Else float32, whose range a power would leave:
    elements are divided by the largest of them first.
    """
    wide = _has_float64(tensor.device)
    one = torch.ones((), dtype=torch.float64 if wide else torch.float32, device=tensor.device)
    if tensor.numel() == 0:
        return torch.stack([one, torch.full_like(one, math.inf if norm_type < 0 else 0.0)])
    is_sum = math.isfinite(norm_type) and norm_type > 0
    scale = one if wide or not is_sum else _safe_scale(tensor)
    parts = []
    for chunk in chunks(tensor, DEVICE_CHUNK_NUMEL):
        x = _wide(chunk, norm_type) if wide else _narrow(chunk)
        parts.append(_reduce_chunk(x if wide or not is_sum else x / scale, norm_type))
    return torch.stack([scale, *parts])


def _fetch(rows: list[torch.Tensor]) -> tuple[list[list[float]], Copies]:
    """Bring 1-D tensors to the host, in one copy from each device."""
    fetched: list[list[float]] = [[] for _ in rows]
    by_device: dict[torch.device, list[int]] = {}
    for i, row in enumerate(rows):
        by_device.setdefault(row.device, []).append(i)
    for indices in by_device.values():
        flat = torch.cat([rows[i] for i in indices]).tolist()
        start = 0
        for i in indices:
            fetched[i] = flat[start : start + rows[i].numel()]
            start += rows[i].numel()
    num_copies = sum(device.type != "cpu" for device in by_device)
    return fetched, Copies(d2h=num_copies, host_syncs=num_copies)


def _narrow(chunk: torch.Tensor) -> torch.Tensor:
    return (chunk.abs() if chunk.is_complex() else chunk).float().reshape(-1)


def _safe_scale(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude as float32, or 1 where dividing by it would not help."""
    largest = torch.stack([_narrow(c).abs().max() for c in chunks(tensor, DEVICE_CHUNK_NUMEL)])
    scale = largest.max()
    return torch.where((scale > 0) & torch.isfinite(scale), scale, torch.ones_like(scale))


def _unscale(value: float, scale: float, norm_type: float) -> float:
    """Return value * scale^p, inf where that leaves float64's range."""
    if scale == 1.0:
        return value
    try:
        power: float = scale**norm_type
    except OverflowError:
        return math.inf
    return value * power


@functools.cache
def _has_float64(device: torch.device) -> bool:
    """Try the very operators that `_launch` would use; nothing is fetched."""
    try:
        x = torch.ones(1, device=device).double()
        torch.stack([torch.dot(x, x), x.abs().pow_(3.0).sum()]).max()
    except (RuntimeError, TypeError):
        return False
    return True
