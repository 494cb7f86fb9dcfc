"""Start the ranks: torchrun's, one per accelerator, or forked ones on the simulated NPU."""

from __future__ import annotations

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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hyper_parallel.testing import simnpu
from hyper_parallel.trainer.config import Config, ConfigError

__all__ = [
    "RankFailedError",
    "exit_on_sigterm",
    "launch",
    "say",
    "started_by_torchrun",
    "uses_simulator",
    "validate_machine",
]

Result = TypeVar("Result")

_TORCHRUN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_SIMULATED_DEVICES_VARIABLE = "HYPER_PARALLEL_SIMNPU_DEVICES"
_LAST_WORDS_S = 0.3  # how long other ranks may still say why they failed
_TEAR_DOWN_S = 10.0
_LEAVE = b"leave"


class RankFailedError(RuntimeError):
    """A rank raised or died, and the others were ended; the message says which and why."""


def exit_on_sigterm() -> None:
    """Make `timeout` and schedulers end the ranks too, not only the process that started them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


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
        ConfigError: torchrun started another number of ranks, or devices are missing.
    """
    problems = []
    sizes = "fsdp_config.dp_shard_size / accelerator.tp_size"
    needed = f"{config.fsdp_config.dp_shard_size} x {config.accelerator.tp_size} ranks"
    num_local_ranks = config.num_ranks
    if started_by_torchrun():
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if int(os.environ["WORLD_SIZE"]) != config.num_ranks:
            started = f"torchrun started {os.environ['WORLD_SIZE']}"
            problems.append(f"{sizes}: {needed} are configured, {started}")
    if config.device_type != "cpu" and not uses_simulator(config):
        device_module = getattr(torch, config.device_type, None)
        num_devices = device_module.device_count() if device_module is not None else 0
        if num_devices == 0:
            remedy = "use gloo (CPU) or, without torch_npu, hccl (simulated)"
            problems.append(
                f"training.backend: {config.training.backend} needs a {config.device_type} "
                f"device and this machine shows none; {remedy}"
            )
        elif num_devices < num_local_ranks:
            problems.append(f"{sizes}: {needed}, but this machine has {num_devices} devices")
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
    if config.device_type == "cpu" or uses_simulator(config):
        # Forked ranks start in a second; OpenMP's workers would not survive the fork.
        torch.set_num_threads(1)
        start_method = "fork"
    else:
        start_method = "spawn"
    if uses_simulator(config):
        say("no NPU here: using the simulated one")
        _install_simulator(config.num_ranks)
    say(f"starting {config.num_ranks} ranks ({config.training.backend})")
    with tempfile.TemporaryDirectory() as folder:
        ranks = _Ranks(start_method)
        try:
            for rank in range(config.num_ranks):
                ranks.start(rank, rank_fn, config, os.path.join(folder, "store"))
            return ranks.collect()
        finally:
            ranks.end()


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks already."""
    return os.environ.keys() >= _TORCHRUN_VARIABLES


def _run_as_torchrun_rank(rank_fn: Callable[[Config], Result], config: Config) -> Result:
    rank = int(os.environ["RANK"])
    if uses_simulator(config):
        if rank == 0:
            say("no NPU here: using the simulated one")
        _install_simulator(config.num_ranks)
    _select_device(config, int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(config.training.backend)
    result = rank_fn(config)
    dist.destroy_process_group()
    return result


def _install_simulator(num_ranks: int) -> None:
    """Install it with a device for every rank; says so itself if it must be compiled first."""
    os.environ.setdefault(_SIMULATED_DEVICES_VARIABLE, str(max(num_ranks, 8)))
    simnpu.install()
    num_devices = torch.accelerator.device_count()
    if num_devices < num_ranks:
        raise ConfigError(
            [f"{_SIMULATED_DEVICES_VARIABLE}: {num_ranks} ranks need as many, found {num_devices}"],
            source="environment",
        )


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
        process.start()
        theirs.close()  # so that the pipe ends when the rank does
        self.processes.append(process)
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


def _rank_main(
    parent: Connection,
    rank: int,
    rank_fn: Callable[[Config], Any],
    config: Config,
    store_path: str,
) -> None:
    """Run one started rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
