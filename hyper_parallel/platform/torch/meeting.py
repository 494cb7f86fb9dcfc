"""The meeting of a group's ranks before their first collective.

They check in on the group's key-value store, where a rank that never comes can be named, which a
hanging collective cannot do.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from .lanes import describe_ranks
from .torch_private import group_store, group_timeout

if TYPE_CHECKING:
    from .reduction_groups import ReductionGroup
    from .torch_private import KeyValueStore

__all__ = ["meet"]

_logger = logging.getLogger("hyper_parallel")
_patience = timedelta(seconds=5)
_num_met: dict[str, int] = {}


def meet(group: ReductionGroup) -> None:
    """Wait on the store until every rank of the group is here.

    Ranks: all of the group.

    Raises:
        RuntimeError: At the group's timeout, naming the ranks that did not come.
        ValueError: On every rank, if they found different kinds of devices to reduce on.
    """
    if "fake" in dist.get_backend_config(group.group):
        return  # a dry run of one rank, whose store has nothing to tell
    store = group_store(group.group)
    timeout = group_timeout(group.group, group.device)
    # A store may outlive a group of the same name (torchrun's does): count the meetings that came
    # about. One that did not is the one that late ranks are still to come to.
    name = group.group.group_name
    prefix = f"hyper_parallel/{name}/{_num_met.get(name, 0)}"
    keys = {rank: f"{prefix}/{rank}" for rank in group.ranks}
    device_key = f"{prefix}/{group.device.type}"

    start = time.monotonic()
    if store.add(keys[group.rank], 1) == 1:
        store.add(device_key, 1)
        if store.add(f"{prefix}/count", 1) == group.size:
            store.set(f"{prefix}/all", "here")
    if not _wait(store, f"{prefix}/all", min(_patience, timeout)):
        _logger.warning(
            "rank %d: waiting for rank(s) %s to clip gradients over this group for the first "
            "time; if they do not train this model, pass group=",
            group.rank,
            describe_ranks(_missing(store, keys)),
        )
        rest = timeout - timedelta(seconds=time.monotonic() - start)
        if not _wait(store, f"{prefix}/all", rest):
            raise RuntimeError(
                f"rank {group.rank}: rank(s) {describe_ranks(_missing(store, keys))} did not come "
                f"to clip gradients over the group of ranks {describe_ranks(group.ranks)} within "
                f"{timeout.total_seconds():g} s; every rank of the group must call. If they do not "
                "train this model, pass group=reduction_group(mesh); if their list of parameters "
                "may hold no DTensor, clip through NormReducer(model)"
            )
    _num_met[name] = _num_met.get(name, 0) + 1
    if store.add(device_key, 0) != group.size:
        raise ValueError(
            f"rank {group.rank}: it would reduce on {group.device.type}, and other ranks of the "
            "group on another kind of device; make the accelerator available on all of them"
        )


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
