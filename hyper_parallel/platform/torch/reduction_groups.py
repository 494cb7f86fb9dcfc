"""The groups that clips reduce over, and what their ranks tell each other outside the reduce.

Small collectives on integer tensors, no pickle: for the agreement on a layout, the account of a
failure, float64 extrema.
"""

from __future__ import annotations

import functools
import json
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from .clip_result import Copies
from .lanes import describe_ranks
from .meeting import AgreementError
from .torch_private import all_gather_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .lanes import Layout
    from .staging_buffer import StagingBuffer

__all__ = ["ReductionGroup", "default_group_reduces", "reduction_group", "resolve_group"]

_MANY_DEVICES = ("gloo", "mpi", "ucc")

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, ReductionGroup] = weakref.WeakKeyDictionary()


class ReductionGroup:
    """A process group with the device on which it reduces.

    Attributes:
        rank: This rank, global. Inside the group: `group_rank`.
        ranks: Global ranks of the group, by group rank.
        layout: What its ranks agreed on last; None before the first time, and after an exception
            in a collective.
        staging: The buffer of its reduces.
        copies: What all exchanges and reduces over the group have cost so far.
        warned_of_spread: Whether replicas were found apart; that is told once.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank()
        self.group_rank = dist.get_rank(group)
        self.layout: Layout | None = None
        self.staging: StagingBuffer | None = None
        self.copies = Copies()
        self.warned_of_spread = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, as long as it lives.

        Raises:
            RuntimeError: After `destroy_process_group`.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed; make a new NormReducer")
        return group

    @functools.cached_property
    def device(self) -> torch.device:
        """Where a tensor must live to be reduced.

        Decided by the group's backends, never by where this rank's gradients happen to be; when
        the ranks first meet they check that all of them found the same kind. Fixed then.
        """
        return _resolve_device(self.group)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's list of int64 values; the lists may differ in length."""
        rows = self._gather(torch.tensor(values, dtype=torch.int64, device="cpu"))
        return [row.tolist() for row in rows]

    def gather_json(self, value: object) -> list[Any]:
        """Return every rank's JSON-able value; meant for few ranks with something, others None."""
        text = b"" if value is None else json.dumps(value).encode()
        rows = self._gather(torch.tensor(list(text), dtype=torch.uint8, device="cpu"))
        return [json.loads(bytes(row.tolist())) if row.numel() else None for row in rows]

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Return the sum over ranks of equally long lists; sums must fit int32."""
        tensor = torch.tensor(values, dtype=torch.int32, device="cpu").to(self.device)
        dist.all_reduce(tensor, group=self.group)
        summed: list[int] = tensor.tolist()
        self._count_exchange()
        return summed

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's 1-D tensor of one dtype, on the CPU; lengths may differ."""
        own_length = torch.tensor([values.numel()], dtype=torch.int64, device="cpu")
        lengths = self._gather_equal(own_length).flatten().tolist()
        longest = max(lengths)
        if longest == 0:
            return [values] * self.size
        padded = values.new_zeros(longest)
        padded[: values.numel()] = values
        rows = self._gather_equal(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _gather_equal(self, row: torch.Tensor) -> torch.Tensor:
        """Return the equally long rows of all ranks, [group size, length], on the CPU."""
        gathered = torch.empty(self.size * row.numel(), dtype=row.dtype, device=self.device)
        all_gather_rows(gathered, row.to(self.device), self.group)
        self._count_exchange()
        return gathered.cpu().view(self.size, -1)

    def _count_exchange(self) -> None:
        """Count one blocking copy up, one collective, one blocking copy down."""
        moves = 0 if self.device.type == "cpu" else 1
        self.copies += Copies(h2d=moves, collectives=1, d2h=moves, host_syncs=2 * moves)


def resolve_group(group: dist.ProcessGroup | None) -> ReductionGroup | None:
    """Return the group that a clip reduces over; None where there is nobody to reduce with.

    Args:
        group: A process group, or None for the default one. It is never chosen from gradients or
            lists: two ranks with different lists would choose differently and hang.

    Raises:
        ValueError: If this rank is not in `group`, or no backend of it can be used.
    """
    if not dist.is_initialized():
        if group is None:
            return None
        raise ValueError("group= was given, but torch.distributed is not initialized")
    process_group = group if group is not None else _default_group()
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group it was told to clip over; only the "
            "group's ranks may call"
        )
    if dist.get_world_size(process_group) == 1:
        return None
    if process_group not in _groups:
        _groups[process_group] = ReductionGroup(process_group)
    return _groups[process_group]


def default_group_reduces() -> bool:
    """Tell whether gradients were clipped over the default group before."""
    group = _groups.get(_default_group()) if dist.is_initialized() else None
    return group is not None and group.layout is not None


def reduction_group(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Make, at set-up, the group of all ranks of a mesh, to be passed as `group=`.

    Args:
        mesh: The mesh that this rank's model is sharded over. Ranks may pass different ones, such
            as one per replica of a model; None on a rank that trains no such model.

    Returns:
        The group of the mesh's ranks; the default group itself where the mesh covers it, and on a
        rank that passes None.

    Ranks: all of the default group, since making a group asks all of them.

    Raises:
        ValueError: If torch.distributed is not initialized; on every rank, if one passes a mesh
            that it is not part of.
    """
    if not dist.is_initialized():
        raise ValueError("reduction_group(mesh) needs torch.distributed to be initialized")
    default = _default_group()
    world = resolve_group(None)
    if world is None:
        return default
    own = tuple(sorted(mesh.mesh.flatten().tolist())) if mesh is not None else ()
    passed = [tuple(row) for row in world.gather_ints(own)]
    strangers = [rank for rank, ranks in enumerate(passed) if ranks and rank not in ranks]
    if strangers:
        raise AgreementError(
            f"rank(s) {describe_ranks(strangers)} are not part of the mesh that they passed; pass "
            "the one that this rank's own model is sharded over, or None on a rank that trains none"
        )
    made = {
        ranks: dist.new_group(list(ranks))
        for ranks in sorted(set(passed))
        if ranks and len(ranks) < world.size
    }
    mine: dist.ProcessGroup = made.get(own, default)
    return mine


def _default_group() -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.group.WORLD)


def _resolve_device(group: dist.ProcessGroup) -> torch.device:
    """Return the accelerator if one of the group's backends is made for one, else the CPU.

    gloo lists `cuda` among its devices but goes through the host: a gloo group counts as CPU.
    """
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    for device_type, backend in backends.items():
        if device_type != "cpu" and backend not in _MANY_DEVICES and _is_usable(device_type):
            if group.bound_device_id is not None:
                return group.bound_device_id
            index = torch.get_device_module(device_type).current_device()
            return torch.device(device_type, index)
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(
        f"rank {dist.get_rank()}: no backend of the group ({config}) can be used here: it takes "
        "no CPU tensor and its device is not available; start torch.distributed with a backend "
        "that is, such as init_process_group('cpu:gloo'), or with 'cpu:gloo,npu:hccl'"
    )


def _is_usable(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):
        return False
