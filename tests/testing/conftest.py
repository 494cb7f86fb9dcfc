from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.testing import simnpu

# Here and not in a fixture: the first call on a machine compiles, which may take longer than a
# test's timeout.
simnpu.install()


@pytest.fixture(autouse=True)
def fresh_simulator() -> Iterator[None]:
    simnpu.configure()
    simnpu.reset_counters()
    yield
    simnpu.configure()


@pytest.fixture(autouse=True)
def no_backward_in_this_process() -> Iterator[None]:
    """Fail the test that would break every later one.

    With an accelerator there, the first backward pass of a process starts torch's autograd threads,
    and after that torch refuses backward passes in forked ranks.
    """
    yield
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert not {name for name in threads if name.startswith("pt_autograd")}
