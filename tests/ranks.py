"""Run a function on several forked ranks, with a deadline that turns a hang into a failure.

Forked, not spawned: a rank starts in a second and may be any closure. The parent never runs a
parallel torch region (tests/conftest.py holds it to one thread), since OpenMP's workers do not
survive a fork.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the first DTensor operation imports it: once here, not in every rank
import torch.distributed as dist

__all__ = ["RankFailedError", "run_ranks"]


class RankFailedError(AssertionError):
    """A rank raised, died or was still running at the deadline."""


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 30.0,
    group_timeout_s: float | None = None,
) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a fresh default group and return the results.

    Args:
        fn: Runs in the child; its result is pickled back. Closures are fine.
        num_ranks: World size.
        *args: Passed on to every rank.
        backend: As for `init_process_group`; `hccl` means the simulated NPU, rank r on device r.
            `none` starts the ranks without a process group.
        timeout_s: Every rank is killed and the test fails when the slowest takes longer.
        group_timeout_s: The process group's own timeout; half of `timeout_s` by default.

    Raises:
        RankFailedError: With the traceback of every rank that raised, died or hung.
    """
    context = multiprocessing.get_context("fork")
    if "hccl" in backend:
        from hyper_parallel.testing import simnpu

        simnpu.install()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        group_timeout = datetime.timedelta(seconds=group_timeout_s or timeout_s / 2)
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, fn, rank, num_ranks, args, backend, path, group_timeout),
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            outcomes = _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [
        f"--- rank {rank} ---\n{text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok
    ]
    if failures:
        raise RankFailedError("\n".join(failures))
    return [outcomes[rank][1] for rank in range(num_ranks)]


def _collect(pipes: dict[Connection, int], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Return (ok, result or traceback) per rank; ranks that say nothing in time are failures."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "died without a word")
    for rank in waiting.values():
        outcomes[rank] = (False, "still running at the deadline")
    return outcomes


def _rank_main(
    parent: Connection,
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    backend: str,
    path: str,
    group_timeout: datetime.timedelta,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    torch.set_num_threads(1)
    try:
        if "hccl" in backend:
            torch.npu.set_device(rank)
        if backend != "none":
            store = dist.FileStore(path, num_ranks)
            store.set_timeout(group_timeout)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=group_timeout,
            )
        outcome: tuple[bool, Any] = (True, fn(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    parent.send_bytes(pickle.dumps(outcome))
    # Stay until the parent kills all: others may still be connecting to this rank. And no
    # tear-down, which would wait for a rank that failed.
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(0)
