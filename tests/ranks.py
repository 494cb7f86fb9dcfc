"""Run functions on several forked ranks, with a deadline that turns a hang into a failure.

Forked, not spawned: a rank starts in a second and may be any closure. The parent never runs a
parallel torch region (tests/conftest.py holds it to one thread), since OpenMP's workers do not
survive a fork.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the first DTensor operation imports it: once here, not in every rank
import torch.distributed as dist

__all__ = ["HOST_AND_NPU", "RankFailedError", "RankPool", "run_ranks"]

HOST_AND_NPU = "cpu:gloo,npu:hccl"
"""Backends of a group whose ranks may have gradients on the host and on the simulated NPU."""

_DEAD = "died without a word"
Task = Callable[[int], Any]


class RankFailedError(AssertionError):
    """A rank raised, died or was still running at the deadline."""


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 30.0,
    group_timeout_s: float | None = None,
    victims: Collection[int] = (),
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
        victims: Ranks that are to die on the way. Their result is None.

    Raises:
        RankFailedError: With the traceback of every rank that raised, died or hung.
    """
    ranks = _Ranks(
        num_ranks,
        backend=backend,
        group_timeout_s=group_timeout_s or timeout_s / 2,
        first_task=lambda rank: fn(rank, *args),
    )
    try:
        return ranks.results(timeout_s, victims)
    finally:
        ranks.kill()


class RankPool:
    """Ranks that stay for many short tasks, and meet on a TCP store, as torchrun's do.

    They start at the first task, and anew after one that failed, hung or lost a rank.

    Args:
        num_ranks: World size.
        backend: As for `run_ranks`.
        group_timeout_s: The default group's timeout.
    """

    def __init__(self, num_ranks: int, *, backend: str, group_timeout_s: float) -> None:
        self._start = functools.partial(
            _Ranks, num_ranks, backend=backend, group_timeout_s=group_timeout_s, on_tcp=True
        )
        self._ranks: _Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Call `fn(rank, *args)` on every rank and return the results.

        Args:
            fn: Of module level, since it is sent by name.
            *args: Pickled.
            timeout_s: As for `run_ranks`.

        Raises:
            RankFailedError: As `run_ranks`.
        """
        ranks = self._ranks = self._ranks or self._start()
        try:
            ranks.send(fn, args)
            return ranks.results(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the ranks."""
        if self._ranks is not None:
            self._ranks.kill()
        self._ranks = None


class _Ranks:
    """Forked ranks, each with a pipe through which it takes tasks and answers."""

    def __init__(
        self,
        num_ranks: int,
        *,
        backend: str,
        group_timeout_s: float,
        first_task: Task | None = None,
        on_tcp: bool = False,
    ) -> None:
        if "hccl" in backend:
            from hyper_parallel.testing import simnpu

            simnpu.install()
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, "store")
        connect = functools.partial(dist.FileStore, path, num_ranks)
        if on_tcp:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            connect = functools.partial(dist.TCPStore, "127.0.0.1", self._server.port)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            join = functools.partial(
                _join_group,
                rank,
                num_ranks,
                backend,
                connect,
                datetime.timedelta(seconds=group_timeout_s),
            )
            process = context.Process(target=_serve, args=(theirs, rank, join, first_task))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def send(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        task = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send_bytes(task)

    def results(self, timeout_s: float, victims: Collection[int] = ()) -> list[Any]:
        """Return what the ranks answer to one task, or raise what they fail with."""
        outcomes = _collect(self._pipes, time.monotonic() + timeout_s)
        for rank in victims:
            has_died = outcomes[rank] == (False, _DEAD)
            outcomes[rank] = (True, None) if has_died else (False, "it was to die, but did not")
        failures = [
            f"--- rank {rank} ---\n{text}"
            for rank, (ok, text) in sorted(outcomes.items())
            if not ok
        ]
        if failures:
            raise RankFailedError("\n".join(failures))
        return [result for _, (_, result) in sorted(outcomes.items())]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _collect(pipes: list[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Return (ok, result or traceback) per rank; ranks that say nothing in time are failures."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, _DEAD)
    for rank in waiting.values():
        outcomes[rank] = (False, "still running at the deadline")
    return outcomes


def _serve(
    parent: Connection, rank: int, join: Callable[[], None], first_task: Task | None
) -> None:
    """Do one task after the other, until the parent kills the process or goes.

    Ranks stay when they are done: others may still be connecting to them. And no tear-down, which
    would wait for a rank that failed.
    """
    tasks = _received_tasks(parent) if first_task is None else iter([first_task])
    for i, task in enumerate(tasks):
        try:
            if i == 0:
                join()
            outcome: tuple[bool, Any] = (True, task(rank))
        except BaseException:
            outcome = (False, traceback.format_exc())
        parent.send_bytes(pickle.dumps(outcome))
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(0)


def _received_tasks(parent: Connection) -> Iterator[Task]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            fn, args = pickle.loads(parent.recv_bytes())
            yield lambda rank, fn=fn, args=args: fn(rank, *args)


def _join_group(
    rank: int,
    num_ranks: int,
    backend: str,
    connect: Callable[[], dist.Store],
    timeout: datetime.timedelta,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    torch.set_num_threads(1)
    if "hccl" in backend:
        torch.npu.set_device(rank % torch.npu.device_count())
    if backend != "none":
        store = connect()
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
