"""How many threads the host kernels may use."""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["cgroup_cpus", "num_threads"]

_THREADS_VARIABLE = "HYPER_PARALLEL_NUM_THREADS"
_RANKS_VARIABLE = "LOCAL_WORLD_SIZE"  # ranks on this machine, as torchrun sets it
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def num_threads() -> int:
    """Return HYPER_PARALLEL_NUM_THREADS, else this rank's share of the CPUs it may use.

    Those are the CPUs of its affinity mask, less if a cgroup's quota is less, divided by
    LOCAL_WORLD_SIZE. Not OMP_NUM_THREADS: torchrun sets that to 1 and nobody means it for this.

    Raises:
        ValueError: If a variable is set to anything but a positive number.
    """
    asked = os.environ.get(_THREADS_VARIABLE)
    if asked:
        return _positive(_THREADS_VARIABLE, asked)
    num_ranks = _positive(_RANKS_VARIABLE, os.environ.get(_RANKS_VARIABLE) or "1")
    num_cpus = min(_affinity_cpus(), cgroup_cpus(_CGROUP_ROOT, _OWN_CGROUPS))
    return max(1, int(num_cpus) // num_ranks)


def _positive(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"expected the environment variable {name} to be 1 or more, got {text!r}")
    return int(text)


def _affinity_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def cgroup_cpus(root: Path, own_cgroups: Path) -> float:
    """Return the CPUs' worth of time that this process's cgroups allow it; inf if they do not say.

    Args:
        root: Where cgroup file systems are mounted.
        own_cgroups: The file that names this process's cgroups.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one tree, a limit at every level
            quotas += map(_quota_v2, _levels(root, path))
        elif "cpu" in controllers.split(","):
            quotas += map(_quota_v1, _levels(root / "cpu", path))
    return min(quotas)


def _levels(mount: Path, path: str) -> list[Path]:
    """Return the folders of a cgroup and all above it; in a container, its own is the mount."""
    folder = mount / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _quota_v2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else max(1.0, int(quota) / int(period))


def _quota_v1(folder: Path) -> float:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota <= 0 else max(1.0, quota / period)
