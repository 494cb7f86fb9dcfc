"""A layout as a table that a person can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hyper_parallel.kernels import host, triton

from .lanes import UNCOUNTED, UNSHARDED, ShardUnion, describe_ranks
from .torch_private import local_tensors
from .wire_format import WireFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .grad_shards import GradShards
    from .lanes import Layout, RankSet
    from .reach import Reach

__all__ = ["LaneUse", "describe_buffer", "describe_kernels", "format_lanes", "lane_uses"]

_MOST_REPLICAS = 4


@dataclass(frozen=True)
class LaneUse:
    """What one rank has in a lane.

    Attributes:
        rank_set: The lane's; `UNSHARDED` and `UNCOUNTED` have none.
        num_parameters: How many parameters' gradients.
        num_bytes: Of their shards on this rank.
        why: What put them there, in words.
    """

    rank_set: RankSet
    num_parameters: int = 0
    num_bytes: int = 0
    why: str = ""


def lane_uses(
    shards: GradShards, layout: Layout | None, stages: RankSet | None = None
) -> list[LaneUse]:
    """Return what a rank has in each lane, those of its pp peers included, in the lanes' order.

    Args:
        shards: The rank's parameters, with the reaches that are foretold for their gradients.
        layout: The group's; None without one.
        stages: The rank's pp group.
    """
    found: dict[RankSet, list[int]] = {}
    reasons: dict[RankSet, set[str]] = {}
    for tensor, reach in zip(shards.tensors, shards.reaches, strict=True):
        rank_set = _rank_set_of(reach, layout)
        [local] = local_tensors([tensor])
        found.setdefault(rank_set, []).append(local.numel() * local.element_size())
        reasons.setdefault(rank_set, set()).add(_reason(reach, rank_set, stages))
    uses = {
        rank_set: LaneUse(rank_set, len(sizes), sum(sizes), "; ".join(sorted(reasons[rank_set])))
        for rank_set, sizes in found.items()
    }
    read = layout.read_by(stages) if layout else ()
    ordered = [*read, *(s for s in (UNSHARDED, UNCOUNTED) if s in uses)]
    return [uses.get(s) or LaneUse(s, why=_reason_to_read(s, layout)) for s in ordered]


def format_lanes(uses: Iterable[LaneUse], lane_of: Mapping[RankSet, int]) -> str:
    """Return a table with a row for each use."""
    rows = [("lane", "ranks", "parameters", "bytes here", "why")]
    for use in uses:
        is_lane = use.rank_set in lane_of
        rows.append(
            (
                str(lane_of[use.rank_set]) if is_lane else "-",
                describe_ranks(use.rank_set) if is_lane else "this one",
                f"{use.num_parameters:,}",
                f"{use.num_bytes:,}",
                use.why,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_format_row(row, widths) for row in rows)


def describe_buffer(group_size: int, num_lanes: int) -> str:
    """Return the size of the reduction buffer, which is the same for all norm types."""
    wire = WireFormat(group_size, 2.0)
    numel = wire.header_numel + num_lanes * wire.lane_numel
    return (
        f"{4 * numel:,} bytes: {num_lanes} x {wire.lane_numel} floats for the lanes, "
        f"{wire.header_numel} for the header"
    )


def describe_kernels() -> str:
    """Return what measures and scales shards on this machine."""
    accelerator = torch.accelerator.current_accelerator()
    has_triton = accelerator is not None and triton.is_available(accelerator.type)
    on_device = "Triton" if has_triton else "torch operators"
    if not host.is_available():
        return f"host shards: torch operators (no kernels were built); device shards: {on_device}"
    isa = host.instruction_sets()[0]
    return f"host shards: C++ ({isa}, {host.num_threads()} threads); device shards: {on_device}"


def _rank_set_of(reach: Reach, layout: Layout | None) -> RankSet:
    rank_set = layout.rank_set_of(reach.rank_set) if layout else None
    if rank_set is not None:
        return rank_set
    return UNSHARDED if isinstance(reach.rank_set, ShardUnion) else reach.rank_set


def _reason(reach: Reach, rank_set: RankSet, stages: RankSet | None) -> str:
    if rank_set == UNCOUNTED:
        return "copies that another rank of the pp group counts"
    if rank_set == UNSHARDED:
        return "held whole: added after the reduce"
    if isinstance(reach.rank_set, ShardUnion):
        return "DTensors sharded over a group beside their mesh (sharded_over)"
    if reach.pending is not None:
        return "Partial, or sharded: added up first"
    if reach.siblings:
        others = [describe_ranks(s) for s in reach.siblings if s != rank_set]
        more = len(others) - _MOST_REPLICAS
        named = " | ".join(others[:_MOST_REPLICAS]) + (f" and {more} more" if more > 0 else "")
        return f"sharded; replicas on {named}"
    if reach.kind and reach.copies == ():
        return "sharded over all of its mesh"
    if rank_set == stages:
        return "held whole, different on each stage (pp_group)"
    return "declared as sharded (sharded_over)" if not reach.kind else "sharded"


def _reason_to_read(rank_set: RankSet, layout: Layout | None) -> str:
    own = layout is not None and rank_set in layout.own_rank_sets
    return "of other ranks of this set" if own else "of pp peers"


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if i in (0, 2, 3) else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
