"""What figures depend on: processor, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from hyper_parallel.kernels import host

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, object]:
    """Return what a reader needs to know about the machine and the software on it."""
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "instruction_set": host.instruction_sets()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "load_average": os.getloadavg(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str:
    """Return the commit, with a + if tracked files other than results differ from it."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ":/")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    generated = ("benchmarks/results/", "README.md")
    others = [line for line in changed.splitlines() if not line[3:].startswith(generated)]
    return commit + ("+" if others else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.rstrip()
