"""Start the ranks: torchrun's, one per accelerator, or forked ones on the simulated NPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hyper_parallel.testing import simnpu
from hyper_parallel.trainer.command_line import STOP_SIGNALS, CommandError, hold_stop_signals
from hyper_parallel.trainer.config import Config, ConfigError

__all__ = [
    "RankFailedError",
    "launch",
    "say",
    "started_by_torchrun",
    "uses_simulator",
    "validate_machine",
]

Result = TypeVar("Result")

_TORCHRUN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_RANKS_KEYS = "fsdp_config.dp_shard_size / accelerator.tp_size"
_LAST_WORDS_S = 0.3  # how long other ranks may still say why they failed
_TEAR_DOWN_S = 10.0
_LEAVE = b"leave"
_MAX_CPU_RANKS = simnpu.MAX_NUM_DEVICES  # over gloo alone, as many still start on 2 cores
_CPU_RANK_BYTES = 100 * 2**20  # measured, small model: 95 MiB over gloo, 143 on the simulated NPU


class RankFailedError(CommandError):
    """A rank raised or died, and the others were ended; the message says which and why."""


def say(text: str) -> None:
    """Print progress, from one process only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def uses_simulator(config: Config) -> bool:
    """Whether the configured device is an NPU that this machine does not have."""
    return config.device_type == "npu" and importlib.util.find_spec("torch_npu") is None


def validate_machine(config: Config) -> None:
    """Check what the YAML alone cannot tell, before any rank starts.

    Raises:
        ConfigError: torchrun started another number of ranks, devices are missing, or the CPU is
            asked for more ranks than this machine runs.
    """
    problems = []
    needed = f"{config.fsdp_config.dp_shard_size} x {config.accelerator.tp_size} ranks"
    num_local_ranks = _num_local_ranks(config)
    if started_by_torchrun() and int(os.environ["WORLD_SIZE"]) != config.num_ranks:
        started = f"torchrun started {os.environ['WORLD_SIZE']}"
        problems.append(f"{_RANKS_KEYS}: {needed} are configured, {started}")
    if _runs_on_the_cpu(config):
        limit, reason = _limit_of_cpu_ranks()
        if num_local_ranks > limit:
            problems.append(f"{_RANKS_KEYS}: {needed}, but at most {limit} run here: {reason}")
    else:
        device_module = getattr(torch, config.device_type, None)
        num_devices = device_module.device_count() if device_module is not None else 0
        if num_devices == 0:
            remedy = "use gloo (CPU) or, without torch_npu, hccl (simulated)"
            problems.append(
                f"training.backend: {config.training.backend} needs a {config.device_type} "
                f"device and this machine shows none; {remedy}"
            )
        elif num_devices < num_local_ranks:
            problems.append(f"{_RANKS_KEYS}: {needed}, but this machine has {num_devices} devices")
    if problems:
        raise ConfigError(problems)


def launch(rank_fn: Callable[[Config], Result], config: Config) -> list[Result]:
    """Call rank_fn(config) on every rank, inside an initialised default process group.

    Args:
        rank_fn: A module-level function; its result is pickled.
        config: `config.num_ranks` ranks are started, unless torchrun did so already: then this
            process is one of them.

    Returns:
        The results by rank; under torchrun this rank's alone.

    Raises:
        RankFailedError: A rank failed.
    """
    validate_machine(config)
    if started_by_torchrun():
        return [_run_as_torchrun_rank(rank_fn, config)]
    if _runs_on_the_cpu(config):
        # Forked ranks start in a second; OpenMP's workers would not survive the fork.
        torch.set_num_threads(1)
        start_method = "fork"
    else:
        start_method = "spawn"
    if uses_simulator(config):
        say("no NPU here: using the simulated one")
        simnpu.install(num_devices=config.num_ranks)
    say(f"starting {config.num_ranks} ranks ({config.training.backend})")
    with tempfile.TemporaryDirectory() as folder:
        ranks = _Ranks(start_method)
        try:
            for rank in range(config.num_ranks):
                try:
                    ranks.start(rank, rank_fn, config, os.path.join(folder, "store"))
                except OSError as error:
                    refused = f"{config.num_ranks} ranks, but after {rank} this machine refused"
                    raise ConfigError([f"{_RANKS_KEYS}: {refused}: {error}"]) from error
            return ranks.collect()
        finally:
            with hold_stop_signals():
                ranks.end()


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks already."""
    return os.environ.keys() >= _TORCHRUN_VARIABLES


def _run_as_torchrun_rank(rank_fn: Callable[[Config], Result], config: Config) -> Result:
    rank = int(os.environ["RANK"])
    if uses_simulator(config):
        if rank == 0:
            say("no NPU here: using the simulated one")
        simnpu.install(num_devices=_num_local_ranks(config))
    _select_device(config, int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(config.training.backend)
    result = rank_fn(config)
    dist.destroy_process_group()
    return result


def _num_local_ranks(config: Config) -> int:
    """Ranks on this machine."""
    if started_by_torchrun():
        return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return config.num_ranks


def _runs_on_the_cpu(config: Config) -> bool:
    return config.device_type == "cpu" or uses_simulator(config)


def _limit_of_cpu_ranks() -> tuple[int, str]:
    """How many ranks this machine can hold, and why not more."""
    # torchrun's other ranks may have taken theirs already.
    available_bytes = sys.maxsize if started_by_torchrun() else _available_bytes()
    if available_bytes < _MAX_CPU_RANKS * _CPU_RANK_BYTES:
        free, each = available_bytes // 2**20, _CPU_RANK_BYTES // 2**20
        return (
            available_bytes // _CPU_RANK_BYTES,
            f"{free} MiB are free, a rank takes {each} or more",
        )
    return _MAX_CPU_RANKS, "the trainer starts no more on the CPU of one machine"


def _available_bytes() -> int:
    """Memory that programs may still take; where the kernel does not say, all that there is."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # "MemAvailable:   23456 kB"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _select_device(config: Config, local_rank: int) -> None:
    if config.device_type != "cpu":
        torch.accelerator.set_device_index(local_rank)


@dataclass
class _Outcome:
    """What a rank sent: its result, or the traceback of its failure."""

    result: Any = None
    failure: str | None = None


class _Ranks:
    """The started processes; a failure of one is the end of all."""

    def __init__(self, start_method: str) -> None:
        self.context: Any = multiprocessing.get_context(start_method)
        self.processes: list[BaseProcess] = []
        self.rank_of_pipe: dict[Connection, int] = {}

    def start(
        self, rank: int, rank_fn: Callable[[Config], Any], config: Config, store_path: str
    ) -> None:
        ours, theirs = self.context.Pipe()
        arguments = (theirs, rank, rank_fn, config, store_path)
        process = self.context.Process(target=_rank_main, args=arguments, daemon=True)
        # Held, so that no signal leaves a rank that nobody knows, or meets one before it is ready.
        with hold_stop_signals():
            process.start()
            self.processes.append(process)
        theirs.close()  # so that the pipe ends when the rank does
        self.rank_of_pipe[ours] = rank

    def collect(self) -> list[Any]:
        """Wait for all results, or for the first failure."""
        open_pipes = list(self.rank_of_pipe)
        outcomes: dict[int, _Outcome] = {}
        deadline = None  # set by the first failure
        while open_pipes:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(open_pipes, timeout=timeout)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)  # noqa: S101 - wait() returns what it got
                open_pipes.remove(pipe)
                rank = self.rank_of_pipe[pipe]
                outcomes[rank] = self._receive(pipe, rank)
                if outcomes[rank].failure is not None and deadline is None:
                    deadline = time.monotonic() + _LAST_WORDS_S
        # In order of arrival: the first failure is the cause, the rest mostly its echo.
        failures = [(rank, o.failure) for rank, o in outcomes.items() if o.failure is not None]
        if failures:
            text = "\n".join(f"--- rank {rank} ---\n{failure}" for rank, failure in failures)
            raise RankFailedError(f"{len(failures)} ranks failed, the others were ended\n{text}")
        # Nobody leaves before all are done: a peer could still be reading what it sent.
        for pipe in self.rank_of_pipe:
            pipe.send_bytes(_LEAVE)
        for process in self.processes:
            process.join(_TEAR_DOWN_S)
        return [outcomes[rank].result for rank in range(len(self.processes))]

    def end(self) -> None:
        """Kill every rank that still runs."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _receive(self, pipe: Connection, rank: int) -> _Outcome:
        try:
            outcome = pickle.loads(pipe.recv_bytes())
            assert isinstance(outcome, _Outcome)  # noqa: S101
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(_TEAR_DOWN_S)
            code = self.processes[rank].exitcode
            outcome = _Outcome(failure=f"ended without a word, exit code {code}")
        return outcome


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, which SIGKILL gives no warning of.

    Linux alone has this; elsewhere a killed parent leaves ranks behind.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(set_parent_death_signal, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it was gone already
        os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(
    parent: Connection,
    rank: int,
    rank_fn: Callable[[Config], Any],
    config: Config,
    store_path: str,
) -> None:
    """Run one started rank."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None and launcher.pid is not None  # noqa: S101, PT018 - it started us
    _end_with_parent(launcher.pid)
    # Ctrl-C, `timeout` and a closed terminal signal all processes: the parent ends us, in order.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(config.num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(config.num_ranks),
    )
    try:
        _select_device(config, rank)
        dist.init_process_group(
            config.training.backend,
            store=dist.FileStore(store_path, config.num_ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=config.num_ranks,
        )
        outcome = _Outcome(result=rank_fn(config))
    except BaseException:
        outcome = _Outcome(failure=traceback.format_exc())
    parent.send_bytes(pickle.dumps(outcome))
    if outcome.failure is None:
        parent.recv_bytes()  # _LEAVE; a failed rank is killed instead, with all others
        dist.destroy_process_group()
