"""What this process's cgroups leave it of the machine's CPUs, of version 1 or 2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CGROUP_ROOT", "OWN_CGROUPS", "cgroup_cpus", "cgroup_cpuset", "parse_cpu_list"]

CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Where cgroup file systems are mounted."""
OWN_CGROUPS = Path("/proc/self/cgroup")
"""The file that names this process's cgroups."""


@functools.cache
def cgroup_cpus(root: Path, own_cgroups: Path) -> float:
    """Return the CPUs' worth of time that this process's cgroups allow it; inf if they do not say.

    Args:
        root: See CGROUP_ROOT.
        own_cgroups: See OWN_CGROUPS.
    """
    quotas = [float("inf")]
    for controllers, path in _own(own_cgroups):
        if not controllers:  # version 2: one tree, a limit at every level
            quotas += map(_quota_v2, _levels(root, path))
        elif "cpu" in controllers:
            quotas += map(_quota_v1, _levels(root / "cpu", path))
    return min(quotas)


@functools.cache
def cgroup_cpuset(root: Path, own_cgroups: Path) -> frozenset[int] | None:
    """Return the CPUs that this process's cgroups allow it; None if they do not say.

    Args:
        root: See CGROUP_ROOT.
        own_cgroups: See OWN_CGROUPS.
    """
    files: list[Path] = []
    for controllers, path in _own(own_cgroups):
        if not controllers:
            files += [level / "cpuset.cpus.effective" for level in _levels(root, path)]
        elif "cpuset" in controllers:
            levels = _levels(root / "cpuset", path)
            files += [level / "cpuset.effective_cpus" for level in levels]
    for file in files:  # the nearest that there is: it has the limits above it in it
        try:
            if cpus := parse_cpu_list(file.read_text()):
                return cpus
        except (OSError, ValueError):
            continue
    return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs that the kernel writes as in `0-3,8`.

    Raises:
        ValueError: If that is no such list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _own(own_cgroups: Path) -> Iterator[tuple[list[str], str]]:
    """Yield the controllers, none for version 2, and the path of each cgroup."""
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        yield controllers.split(",") if controllers else [], path


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
