"""How many threads the host kernels may use."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from .cgroups import CGROUP_ROOT, OWN_CGROUPS, cgroup_cpus, cgroup_cpuset, parse_cpu_list

__all__ = ["launcher_cpus", "num_threads"]

_THREADS_VARIABLE = "HYPER_PARALLEL_NUM_THREADS"
_RANKS_VARIABLE = "LOCAL_WORLD_SIZE"  # ranks on this machine, as torchrun sets it
_RANK_VARIABLE = b"LOCAL_RANK="  # what a launcher gives to ranks, and does not have itself
_PROC = Path("/proc")


def num_threads() -> int:
    """Return HYPER_PARALLEL_NUM_THREADS, else this rank's share of the CPUs, if it may use so many.

    The share is of the CPUs that the launcher of the ranks may use, less if a cgroup allows less,
    divided by LOCAL_WORLD_SIZE; the CPUs of this rank's own affinity mask are the most. So whoever
    has its mask from the launcher shares it with the other ranks (`taskset` before torchrun), and
    whoever was pinned to CPUs of its own has all of those (`numactl` for each rank, NUMA binding),
    also where several ranks were pinned to the same: 4 of 8 ranks on one of 2 nodes have an eighth
    of the machine each. What cannot be known without asking the others is that ranks were given
    CPUs of their own in unequal parts: the larger ones then are not used up.

    Not OMP_NUM_THREADS: torchrun sets that to 1 and nobody means it for this.

    Raises:
        ValueError: If a variable is set to anything but a positive number.
    """
    asked = os.environ.get(_THREADS_VARIABLE)
    if asked:
        return _positive(_THREADS_VARIABLE, asked)
    num_ranks = _positive(_RANKS_VARIABLE, os.environ.get(_RANKS_VARIABLE) or "1")
    own = _affinity_cpus()
    shared = min(len(_launched_cpus(own)), cgroup_cpus(CGROUP_ROOT, OWN_CGROUPS))
    return max(1, min(len(own), int(shared) // num_ranks))


def _positive(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"expected the environment variable {name} to be 1 or more, got {text!r}")
    return int(text)


def _affinity_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return _all_cpus()


def _all_cpus() -> frozenset[int]:
    return frozenset(range(os.cpu_count() or 1))


def _launched_cpus(own: frozenset[int]) -> frozenset[int]:
    """Return the CPUs that this rank and the others beside it were given together.

    Those of the launcher, if it can be asked and did not give this rank others than it has itself.
    """
    allowed = cgroup_cpuset(CGROUP_ROOT, OWN_CGROUPS)
    launcher = launcher_cpus(_PROC, os.getpid()) or own
    if not own <= launcher:
        return own | (allowed or _all_cpus())
    return own | (launcher & allowed if allowed else launcher)


@functools.cache
def launcher_cpus(proc: Path, pid: int) -> frozenset[int] | None:
    """Return the CPUs of the process that started a rank; None if that cannot be told.

    It is the nearest one above that was not itself started as a rank: a shell that pins itself and
    then runs the training is none.

    Args:
        proc: Where the kernel tells of processes.
        pid: Of the rank.
    """
    try:
        parent = _status(proc, pid)["PPid"]
        while _was_started_as_rank(proc, parent):
            parent = _status(proc, parent)["PPid"]
        return parse_cpu_list(_status(proc, parent)["Cpus_allowed_list"])
    except (OSError, KeyError, ValueError):
        return None


def _status(proc: Path, pid: int | str) -> dict[str, str]:
    lines = (proc / str(pid) / "status").read_text().splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def _was_started_as_rank(proc: Path, pid: str) -> bool:
    try:
        variables = (proc / pid / "environ").read_bytes().split(b"\0")
    except PermissionError:  # another user's, as slurmstepd
        return False
    return any(variable.startswith(_RANK_VARIABLE) for variable in variables)
