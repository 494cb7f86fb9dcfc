"""Every device kernel compiles to HIVM for Ascend, and what must not compile does not.

Nothing runs on an NPU here; see tests/kernels/ascend.py.
"""

import importlib.util
import json

import pytest

from tests.kernels import ascend
from tests.kernels.triton_checks import DTYPES

pytestmark = [pytest.mark.lowering, pytest.mark.timeout(600)]

NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
CASES = [
    *(f"partial_norms-p{power}-{NAMES[str(dtype)]}" for dtype in DTYPES for power in (2, 1, 0)),
    *(f"scale-{NAMES[str(dtype)]}" for dtype in DTYPES),
    *(f"{kernel}-p{power}" for kernel in ("encode", "finish") for power in (2, 1, 0)),
]


def compiled(what: str) -> dict[str, dict[str, str]]:
    missing = [name for name in ("triton", "ascendnpuir") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"needs {missing}: make setup installs them")
    return json.loads(ascend.run_process(what, timeout_s=500))


@pytest.fixture(scope="module")
def launches() -> dict[str, dict[str, str]]:
    return compiled("launches")


@pytest.fixture(scope="module")
def controls() -> dict[str, dict[str, str]]:
    return compiled("controls")


@pytest.mark.parametrize("target", ascend.TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_kernel_compiles_to_hivm_for_a_vector_core(case, target, launches):
    assert not launches[case][target], launches[case][target]


def test_no_launch_is_left_out(launches):
    assert sorted(launches) == sorted(CASES)


@pytest.mark.parametrize("target", ascend.TARGETS)
@pytest.mark.parametrize(
    ("case", "reason"), [("float64", "element type"), ("block-32768", "ub overflow")]
)
def test_what_a_vector_core_cannot_run_does_not_compile(case, reason, target, controls):
    assert reason in controls[case][target]
