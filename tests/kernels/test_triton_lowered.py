"""What triton-ascend lowers the device kernels to computes the right numbers, on the CPU."""

import importlib.util

import pytest

from tests.kernels import ascend


@pytest.mark.lowering
@pytest.mark.timeout(600)
def test_lowered_kernels_pass_the_numeric_checks():
    if not importlib.util.find_spec("triton"):
        pytest.skip("needs Triton: make setup")
    if ascend.missing_tools():
        pytest.skip(
            f"lowered kernels are not run without {ascend.missing_tools()}: make lowered-tools"
        )
    passed = ascend.run_process("run", timeout_s=500).split()
    assert len(passed) == 39
    for kernel in ("partial_norms", "encode", "finish", "scale"):
        assert any(name.startswith(kernel) for name in passed)
