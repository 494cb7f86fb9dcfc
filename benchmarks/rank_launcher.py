"""Forked ranks that say what they are about to do, so that a hang has a name."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the first DTensor operation imports it: once here, not in every rank
import torch.distributed as dist
from torch._logging._internal import set_logs

__all__ = ["RankFailedError", "Say", "run_ranks"]

Say = Callable[[str], None]


class RankFailedError(RuntimeError):
    """A rank raised, died, or said nothing for too long.

    Attributes:
        doing: What the ranks had last said that they were about to do.
    """

    def __init__(self, text: str, doing: str) -> None:
        super().__init__(text)
        self.doing = doing


@dataclass(frozen=True)
class _Message:
    """What a rank tells the parent: what it does next, its result, or the traceback of its end."""

    doing: str | None = None
    result: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class _Rank:
    rank: int
    num_ranks: int
    backend: str
    store_path: str
    silence_s: float


def run_ranks(
    rank_fn: Callable[..., Any], num_ranks: int, *args: Any, backend: str, silence_s: float = 60.0
) -> list[Any]:
    """Call `rank_fn(say, *args)` on forked ranks with a default group; return results by rank.

    Args:
        rank_fn: Its `say(text)` tells the parent what it is about to do.
        num_ranks: World size.
        *args: Passed on.
        backend: As for `init_process_group`.
        silence_s: The ranks are killed if none of them says anything for so long.

    Raises:
        RankFailedError: The others are ended.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                store_path = os.path.join(folder, "store")
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, _Rank(rank, num_ranks, backend, store_path, silence_s)),
                    kwargs={"rank_fn": rank_fn, "args": args},
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
            return _collect(pipes, silence_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: dict[Connection, int], silence_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    doing = "starting"
    while len(results) < len(pipes):
        waiting = {pipe: rank for pipe, rank in pipes.items() if rank not in results}
        ready = wait(list(waiting), timeout=silence_s)
        if not ready:
            raise RankFailedError(f"hung for {silence_s:.0f} s", doing)
        for pipe, rank in waiting.items():
            if pipe not in ready:
                continue
            try:
                message = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                message = _Message(failure="died without a word")
            if message.failure is not None:
                raise RankFailedError(f"rank {rank}: {message.failure}", doing)
            if message.doing is not None:
                doing = message.doing
            else:
                results[rank] = message.result
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    parent: Connection, own: _Rank, rank_fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    os.environ.update(
        RANK=str(own.rank),
        WORLD_SIZE=str(own.num_ranks),
        LOCAL_RANK=str(own.rank),
        LOCAL_WORLD_SIZE=str(own.num_ranks),
    )

    def send(message: _Message) -> None:
        parent.send_bytes(pickle.dumps(message))

    # Peers warn on every rank of what they do; tables show it.
    warnings.simplefilter("ignore")
    set_logs(all=logging.ERROR)
    try:
        if "hccl" in own.backend or "nccl" in own.backend:
            torch.accelerator.set_device_index(own.rank)
        timeout = datetime.timedelta(seconds=own.silence_s / 2)
        store = dist.FileStore(own.store_path, own.num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group(
            own.backend, store=store, rank=own.rank, world_size=own.num_ranks, timeout=timeout
        )
        send(_Message(result=rank_fn(lambda text: send(_Message(doing=text)), *args)))
    except BaseException:
        send(_Message(failure=traceback.format_exc()))
    # Stay until the parent kills all: others may still read what this rank sent.
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()
    os._exit(0)
