"""Keeps the pytest process fit to fork the ranks of a test from (tests/ranks.py).

Besides the one thread below: no test calls `backward()` in this process; it runs in
`run_ranks(..., 1, backend="none")`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

# One thread, set before torch starts any: OpenMP's workers do not survive the fork that starts
# the ranks of a test (tests/ranks.py).
os.environ["OMP_NUM_THREADS"] = "1"
# Before anything imports Triton, which asks once: the kernels for devices run in its interpreter,
# also on the simulated NPU. Tests that compile them do so in processes of their own, and tests of
# real devices (`-m device`) need the real thing.
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import torch

from hyper_parallel.testing import triton_interpreter

torch.set_num_threads(1)
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make Triton's interpreter ready for tests marked `triton`; skip them where there is none."""
    if item.get_closest_marker("triton"):
        if not triton_interpreter.is_wanted():
            pytest.skip("Triton is not installed, or not asked to interpret: make setup")
        triton_interpreter.prepare()


@pytest.fixture(autouse=True)
def no_backward_in_this_process() -> Iterator[None]:
    """Fail the test that would break every later one.

    With an accelerator there, the first backward pass of a process starts torch's autograd threads,
    and after that torch refuses backward passes in forked ranks.
    """
    yield
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert not {name for name in threads if name.startswith("pt_autograd")}
