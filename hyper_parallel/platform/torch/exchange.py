"""What the ranks of a group tell each other outside the one reduce per clip.

Small collectives on integer tensors, no pickle: the agreement on a layout, the account of a
failure, float64 extrema. And the meeting: before their first collective the ranks check in on the
group's store, where a rank that never comes can be named, which a hanging collective cannot do.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from .clip_result import Copies
from .lanes import describe_ranks
from .torch_private import all_gather_rows, group_store, group_timeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .torch_private import KeyValueStore

__all__ = ["ReductionGroup", "reduction_group", "resolve_group"]

_logger = logging.getLogger("hyper_parallel")

_PATIENCE = timedelta(seconds=5)
_MANY_DEVICES = ("gloo", "mpi", "ucc")

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, ReductionGroup] = weakref.WeakKeyDictionary()
_meetings: dict[str, int] = {}


class ReductionGroup:
    """A process group with the device on which it reduces.

    Attributes:
        rank: This rank, global. Inside the group: `group_rank`.
        ranks: Global ranks of the group, by group rank.
        device: Where a tensor must live to be reduced. Decided by the group's backends alone, so
            that it is the same on all ranks, never by where this rank's gradients happen to be.
        memory: What later calls on the same group need: layout, buffer. Dies with the group.
        copies: What all exchanges and reduces over the group have cost so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank()
        self.group_rank = dist.get_rank(group)
        self.device = _resolve_device(group)
        self.memory: dict[str, Any] = {}
        self.copies = Copies()

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

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's list of int64 values; the lists may differ in length."""
        lengths = self._gather(torch.tensor([len(values)], dtype=torch.int64))
        longest = max(row[0] for row in lengths)
        if longest == 0:
            return [[] for _ in self.ranks]
        padded = torch.zeros(longest, dtype=torch.int64)
        padded[: len(values)] = torch.tensor(list(values), dtype=torch.int64)
        rows = self._gather(padded)
        return [row[: length[0]] for row, length in zip(rows, lengths, strict=True)]

    def gather_json(self, value: object) -> list[Any]:
        """Return every rank's JSON-able value; meant for a few kilobytes a rank."""
        return [
            json.loads(bytes(row)) for row in self.gather_ints(list(json.dumps(value).encode()))
        ]

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Return the sum over ranks of equally long lists; sums must fit int32."""
        tensor = torch.tensor(list(values), dtype=torch.int32).to(self.device)
        dist.all_reduce(tensor, group=self.group)
        summed: list[int] = tensor.tolist()
        self._count_exchange()
        return summed

    def meet(self) -> None:
        """Wait on the store until every rank of the group is here.

        Raises:
            RuntimeError: At the group's timeout, naming the ranks that did not come.
        """
        group = self.group
        store = group_store(group)
        timeout = group_timeout(group, self.device)
        # A store may outlive a group of the same name (torchrun's does): count the meetings.
        number = _meetings[group.group_name] = _meetings.get(group.group_name, 0) + 1
        prefix = f"hyper_parallel/{group.group_name}/{number}"
        keys = {rank: f"{prefix}/{rank}" for rank in self.ranks}
        store.set(keys[self.rank], "here")
        if store.add(f"{prefix}/count", 1) == self.size:
            store.set(f"{prefix}/all", "here")
        start = time.monotonic()
        if _wait(store, f"{prefix}/all", min(_PATIENCE, timeout)):
            return
        _logger.warning(
            "rank %d: waiting for rank(s) %s to clip gradients over this group for the first "
            "time; if they do not train this model, pass group=",
            self.rank,
            describe_ranks(_missing(store, keys)),
        )
        if _wait(store, f"{prefix}/all", timeout - timedelta(seconds=time.monotonic() - start)):
            return
        raise RuntimeError(
            f"rank {self.rank}: rank(s) {describe_ranks(_missing(store, keys))} did not come to "
            f"clip gradients over the group of ranks {describe_ranks(self.ranks)} within "
            f"{timeout.total_seconds():g} s; every rank of the group must call. If they do not "
            "train this model, pass group=reduction_group(mesh); if their list of parameters may "
            "hold no DTensor, clip through NormReducer(model)"
        )

    def _gather(self, row: torch.Tensor) -> list[list[int]]:
        """Return the equally long int64 rows of all ranks."""
        gathered = torch.empty(self.size * row.numel(), dtype=row.dtype, device=self.device)
        all_gather_rows(gathered, row.to(self.device), self.group)
        rows: list[list[int]] = gathered.view(self.size, -1).tolist()
        self._count_exchange()
        return rows

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
    if not (dist.is_available() and dist.is_initialized()):
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
        ValueError: If torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise ValueError("reduction_group(mesh) needs torch.distributed to be initialized")
    default = _default_group()
    world = resolve_group(None)
    if world is None:
        return default
    own = tuple(sorted(mesh.mesh.flatten().tolist())) if mesh is not None else ()
    made = {
        ranks: dist.new_group(list(ranks))
        for ranks in sorted({tuple(row) for row in world.gather_ints(own)})
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


def _wait(store: KeyValueStore, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], max(timeout, timedelta(milliseconds=1)))
    except RuntimeError:  # what every store raises at its timeout
        return store.check([key])
    return True


def _missing(store: KeyValueStore, keys: dict[int, str]) -> list[int]:
    """Return the ranks whose key is not set, halving: a store only says whether all of some are."""
    if not keys or store.check(list(keys.values())):
        return []
    if len(keys) == 1:
        return list(keys)
    items = list(keys.items())
    middle = len(items) // 2
    return _missing(store, dict(items[:middle])) + _missing(store, dict(items[middle:]))
