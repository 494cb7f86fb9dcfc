"""Which devices the kernels are launched on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hyper_parallel.kernels.triton import launch

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("device_type", "backend", "is_available"),
    [
        ("cuda", "cuda", True),
        ("cuda", "hip", True),
        ("npu", "npu", True),
        ("cpu", "cuda", False),
        ("cpu", "cpu", False),
        ("xpu", "xpu", False),
        ("xpu", "hip", False),
        ("mtia", "mtia", False),
        ("npu", "cuda", False),
        ("cuda", "npu", False),
    ],
)
def test_devices_that_nobody_knows_how_to_launch_on_are_left_to_torch(
    device_type, backend, is_available, monkeypatch
):
    """Outside the interpreter: there is no such device here, so that its driver is made up."""
    from triton.runtime import driver

    target = SimpleNamespace(backend=backend)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(driver, "active", SimpleNamespace(get_current_target=lambda: target))
    assert launch.is_available.__wrapped__(device_type) is is_available


def test_without_a_driver_there_is_no_device(monkeypatch):
    from triton.runtime import driver

    def no_driver():
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(driver, "active", SimpleNamespace(get_current_target=no_driver))
    assert launch.is_available.__wrapped__("cuda") is False
