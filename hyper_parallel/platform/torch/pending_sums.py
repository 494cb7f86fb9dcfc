"""Partial gradients: the norm of a sum that has not been taken yet.

A rank cannot know alone that another's gradient is Partial, so the header announces it. Then all
ranks exchange what is pending, add each gradient up in bounded chunks by reduce-scatter over the
whole group, to which ranks without it contribute zeros, and each takes the partial norm of the
slices it receives. Rare, and not one all-reduce.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .chunks import DEVICE_CHUNK_NUMEL
from .clip_result import Copies
from .grad_shards import WIDE_DTYPES
from .meeting import AgreementError
from .partial_norms import measure
from .torch_private import reduce_scatter_sum

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .failure import LocalFailure
    from .grad_shards import GradShard
    from .lanes import LaneKey, Layout, RankSet
    from .reduction_groups import ReductionGroup
    from .wire_format import PartialNorm

__all__ = ["measure_pending"]


class _Pending(NamedTuple):
    """One Partial gradient, as all ranks of the group describe it; integers only.

    Attributes:
        sum_lane: Lane number of the ranks over which it is summed.
        key: See `PendingSum`.
        list_key: See there.
        total_lane: Lane number of the ranks that read its norm.
        numel: Elements of the local tensor, which all ranks of the sum have.
        is_average: 1 for avg, 0 for sum.
        wide: 1 to add in float64, for a float64 gradient; else float32.
        is_complex: 1 for complex elements.
    """

    sum_lane: int
    key: int
    list_key: int
    total_lane: int
    numel: int
    is_average: int
    wide: int
    is_complex: int

    @property
    def dtype(self) -> torch.dtype:
        if self.is_complex:
            return torch.complex128 if self.wide else torch.complex64
        return torch.float64 if self.wide else torch.float32


def measure_pending(
    group: ReductionGroup,
    layout: Layout,
    shards: Sequence[GradShard],
    norm_type: float,
    failure: LocalFailure,
    *,
    reproducible: bool = False,
) -> Mapping[RankSet, list[PartialNorm]]:
    """Add up all Partial gradients of the group's ranks and measure this rank's slices.

    Args:
        group: The group.
        layout: With a lane for the rank set and for the ranks of the sum of every one of them.
        shards: This rank's Partial gradients; may be empty.
        norm_type: As for `measure`.
        failure: Takes what fails on this rank meanwhile; it joins the sums to their end.
        reproducible: As for `measure`; the sum itself is the group's, in its own order.

    Returns:
        Partial norms by the rank set that reads them, of which this rank need not be one.

    Ranks: all of the group.

    Raises:
        AgreementError: On every rank, if ranks of one sum disagree on a gradient's size or kind.
    """
    own = {_describe(shard, layout): shard.local for shard in shards}
    rows = group.gather_ints([field for pending in own for field in pending])
    everywhere = sorted({pending for row in rows for pending in _parse(row)})
    _validate_agreement(everywhere)
    rank_sets = list(layout.lane_of)
    partials: dict[RankSet, list[PartialNorm]] = {}
    for pending in everywhere:
        num_summed = len(rank_sets[pending.sum_lane])
        for slice_ in _slices(group, pending, own.get(pending), failure):
            with failure:
                if pending.is_average:
                    slice_ /= num_summed
                measured, fetched = measure([slice_], norm_type, reproducible=reproducible)
                group.copies += fetched
                partials.setdefault(rank_sets[pending.total_lane], []).extend(measured)
    return partials


def _describe(shard: GradShard, layout: Layout) -> _Pending:
    if shard.pending is None:
        raise ValueError("expected only Partial gradients")
    return _Pending(
        sum_lane=layout.lane_of[shard.pending.ranks],
        key=shard.pending.key,
        list_key=shard.pending.list_key,
        total_lane=_lane_of(shard.rank_set, layout),
        numel=shard.local.numel(),
        is_average=int(shard.pending.op == "avg"),
        wide=int(shard.local.dtype in WIDE_DTYPES),
        is_complex=int(shard.local.is_complex()),
    )


def _lane_of(key: LaneKey, layout: Layout) -> int:
    rank_set = layout.rank_set_of(key)
    if rank_set is None:
        raise ValueError("expected a layout with lanes for all Partial gradients")
    return layout.lane_of[rank_set]


def _parse(row: Sequence[int]) -> Iterator[_Pending]:
    width = len(_Pending._fields)
    for start in range(0, len(row), width):
        yield _Pending(*row[start : start + width])


def _validate_agreement(everywhere: Sequence[_Pending]) -> None:
    """Check that addends of one sum fit, and that ranks which go by place list the same shapes.

    A list that differs in order only, among equal shapes, cannot be told without names.
    """
    remedy = "; pass the same list on all ranks of the sum, or clip through NormReducer(model)"
    list_keys: dict[int, set[int]] = {}
    for one, other in itertools.pairwise(everywhere):
        if one[:2] == other[:2] and one.list_key == other.list_key:
            raise AgreementError(
                f"a Partial gradient differs between the ranks of its sum: {one.numel} {one.dtype} "
                f"elements here, {other.numel} {other.dtype} elements there" + remedy
            )
    for pending in everywhere:
        list_keys.setdefault(pending.sum_lane, set()).add(pending.list_key)
    if any(len(keys) > 1 for keys in list_keys.values()):
        raise AgreementError("ranks list other parameters beside their Partial gradients" + remedy)


def _slices(
    group: ReductionGroup, pending: _Pending, local: torch.Tensor | None, failure: LocalFailure
) -> Iterator[torch.Tensor]:
    """Yield this rank's slices of the sum, chunk by chunk.

    What fails on this rank is kept in `failure`: it joins the sum all the same.
    """
    flat: torch.Tensor | None = None
    with failure:
        flat = None if local is None else local.reshape(-1)
    widest = max(1, DEVICE_CHUNK_NUMEL // group.size)
    for start in range(0, pending.numel, widest * group.size):
        numel = min(widest * group.size, pending.numel - start)
        share = -(-numel // group.size)
        chunk = torch.zeros(share * group.size, dtype=pending.dtype, device=group.device)
        with failure:
            if flat is not None:
                chunk[:numel].copy_(flat[start : start + numel])
                group.copies += _cost_of_copy(flat.device, group.device)
        received = torch.empty(share, dtype=pending.dtype, device=group.device)
        reduce_scatter_sum(_as_real(received), _as_real(chunk), group.group)
        group.copies += Copies(collectives=1)
        del chunk  # before the next is made
        # The last ranks' slices may be padding, which is zeros and part of no gradient.
        first = share * group.group_rank
        yield received[: max(0, min(share, numel - first))]


def _cost_of_copy(source: torch.device, target: torch.device) -> Copies:
    up, down = source.type == "cpu", target.type == "cpu"
    if up == down:
        return Copies()
    return Copies(h2d=int(up), d2h=int(down), host_syncs=1)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
