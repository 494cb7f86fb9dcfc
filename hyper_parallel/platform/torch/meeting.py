"""What the ranks of a group tell each other on its key-value store.

There a rank that is missing can be named, which no collective can do: ranks check in before the
first collective, and again after one that failed. A clip in which nothing fails asks no store.
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

__all__ = ["AgreementError", "RanksMissingError", "meet", "report_failure"]

_logger = logging.getLogger("hyper_parallel")
_patience = timedelta(seconds=5)
_num_met: dict[str, int] = {}


class AgreementError(ValueError):
    """What all ranks of a group have decided alike, from what all of them know, and all raise.

    A plain ValueError may be one rank's own; the others would wait for it.
    """


class RanksMissingError(RuntimeError):
    """Ranks that are named did not come."""


def meet(group: ReductionGroup) -> None:
    """Wait on the store until every rank of the group is here.

    Ranks: all of the group.

    Raises:
        RanksMissingError: At the group's timeout, naming the ranks that did not come.
        AgreementError: On every rank, if they found different kinds of devices to reduce on, or one
            of them none.
    """
    if "fake" in dist.get_backend_config(group.group):
        return  # a dry run of one rank, whose store has nothing to tell
    store = group_store(group.group)
    timeout = _timeout(group)
    prefix = _prefix(group)
    keys = {rank: f"{prefix}/{rank}" for rank in group.ranks}
    fault: ValueError | None = None
    try:
        device_type = group.device.type
    except ValueError as error:  # the others are to hear of it
        device_type, fault = "none", error
    device_key = f"{prefix}/{device_type}"

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
            raise RanksMissingError(
                f"rank(s) {describe_ranks(_missing(store, keys))} did not come "
                f"to clip gradients over the group of ranks {describe_ranks(group.ranks)} within "
                f"{timeout.total_seconds():g} s; every rank of the group must call. If they do not "
                "train this model, pass group=reduction_group(mesh); if their list of parameters "
                "may hold no DTensor, clip through NormReducer(model)"
            )
    name = group.group.group_name
    _num_met[name] = _num_met.get(name, 0) + 1
    if fault is not None:
        raise AgreementError(str(fault)) from fault
    if store.add(device_key, 0) != group.size:
        raise AgreementError(
            f"rank {group.rank}: it would reduce on {device_type}, and other ranks of the group on "
            "another kind of device, or on none; make the accelerator available on all of them"
        )


def report_failure(group: ReductionGroup, cause: str) -> list[str]:
    """Tell the other ranks that a collective failed here; return what they tell, if anything.

    Args:
        group: After it the ranks meet anew, so that each reports once between two meetings.
        cause: In one line.

    Ranks: this one alone; waits a few seconds for the others, at most half the group's timeout.
    """
    if "fake" in dist.get_backend_config(group.group):
        return []
    try:
        store = group_store(group.group)
        patience = min(_patience, _timeout(group) / 2)
        prefix = f"{_prefix(group)}/failed"
        keys = {rank: f"{prefix}/{rank}" for rank in group.ranks}
        store.set(keys[group.rank], cause)
        place = store.add(f"{prefix}/count", 1)
        if place == 1:
            store.set(f"{prefix}/first", f"rank {group.rank}: {cause}")
        if place == group.size:
            store.set(f"{prefix}/all", "told")
        everyone = _wait(store, f"{prefix}/all", patience)
        silent = [] if everyone else _missing(store, keys)
        told = []
        if silent:
            told.append(
                f"rank(s) {describe_ranks(silent)} reported no failure within "
                f"{patience.total_seconds():g} s: they died, hang, do not clip, or have finished "
                "this clip"
            )
        if place > 1 and store.check([f"{prefix}/first"]):
            told.append(f"the first to fail was {store.get(f'{prefix}/first').decode()}")
    except RuntimeError as error:  # the store may have died with the rank that kept it
        return [f"the ranks at fault cannot be named, since the store does not answer: {error}"]
    return told


def _timeout(group: ReductionGroup) -> timedelta:
    try:
        return group_timeout(group.group, group.device)
    except ValueError:  # it has no device that can be used here
        return group_store(group.group).timeout


def _prefix(group: ReductionGroup) -> str:
    """Return where the ranks talk from one meeting that comes about to the next.

    A store may outlive a group of the same name (torchrun's does), hence the count. A meeting that
    did not come about is the one that late ranks are still to come to.
    """
    name = group.group.group_name
    return f"hyper_parallel/{name}/{_num_met.get(name, 0)}"


def _wait(store: KeyValueStore, key: str, timeout: timedelta) -> bool:
    if timeout <= timedelta():
        return store.check([key])
    try:
        store.wait([key], timeout)
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
