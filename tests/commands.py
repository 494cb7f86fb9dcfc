"""Commands of this repository, in processes of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: object, timeout_s: float = 55) -> subprocess.CompletedProcess[str]:
    """Run this Python from the root of the repository until it ends, however it does.

    Raises:
        subprocess.TimeoutExpired: If it does not; a little before a test's own deadline.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def output_of(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it and expect it to succeed."""
    done = run_python(*arguments)
    assert done.returncode == 0, done.stderr
    return done
