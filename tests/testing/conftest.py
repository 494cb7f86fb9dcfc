from collections.abc import Iterator

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
