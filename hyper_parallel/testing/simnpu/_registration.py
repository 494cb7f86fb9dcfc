"""Putting the simulated NPU into torch, once per process, unless there is a real one."""

from __future__ import annotations

import datetime
import importlib.util
import math
import os

import torch
import torch.distributed as dist
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from hyper_parallel.testing import triton_interpreter
from hyper_parallel.testing.simnpu import _build, _device_module, _native, _torch_private

__all__ = ["MAX_NUM_DEVICES", "configure", "install", "is_installed", "native"]

MAX_NUM_DEVICES = 127  # torch's device index is a signed byte
_DEFAULT_NUM_DEVICES = 8

_loaded: _native.Native | None = None


def install(*, num_devices: int | None) -> bool:
    """See `simnpu.install`."""
    global _loaded  # torch's registrations are process-wide too
    if num_devices is not None and not 1 <= num_devices <= MAX_NUM_DEVICES:
        raise ValueError(f"num_devices must be from 1 to {MAX_NUM_DEVICES}, got {num_devices}")
    if _loaded is not None:
        _validate_installed(_loaded, num_devices)
        return True
    if _has_real_npu():
        return False
    library = _build.build(_native.MODULE_NAME)
    rename_privateuse1_backend("npu")
    _loaded = _native.load(library)
    _loaded.init(_DEFAULT_NUM_DEVICES if num_devices is None else num_devices)
    _torch_private.register_device_module("npu", _device_module.make_device_module(_loaded))
    generate_methods_for_privateuse1_backend(for_storage=True)
    # For npu only: a CPU tensor then fails in torch, with the message users know.
    dist.Backend.register_backend("hccl", _make_hccl_backend, devices=["npu"])
    triton_interpreter.run_on_device_memory("npu", _loaded)
    # Counters are per process.
    os.register_at_fork(after_in_child=_loaded.reset_counters)
    return True


def is_installed() -> bool:
    """See `simnpu.is_installed`."""
    return _loaded is not None


def native() -> _native.Native:
    """Return the compiled module of the installed simulator."""
    if _loaded is None:
        raise RuntimeError("the simulated NPU is not installed: call simnpu.install() first")
    return _loaded


def configure(*, trace_ops: bool, poison: bool, **durations_us: float) -> None:
    """See `simnpu.configure`."""
    for name, duration in durations_us.items():
        if not math.isfinite(duration) or duration < 0:
            raise ValueError(f"{name} must be a finite number >= 0, got {duration}")
    native().configure(
        durations_us["copy_us"],
        durations_us["copy_us_per_mib"],
        durations_us["collective_us"],
        durations_us["collective_us_per_mib"],
        trace_ops,
        poison,
    )


def _has_real_npu() -> bool:
    return hasattr(torch, "npu") or importlib.util.find_spec("torch_npu") is not None


def _validate_installed(loaded: _native.Native, num_devices: int | None) -> None:
    if num_devices is not None and loaded.device_count() < num_devices:
        raise RuntimeError(
            f"{num_devices} simulated NPUs are needed and this process has {loaded.device_count()} "
            "already: pass num_devices to the first call of simnpu.install()"
        )


def _make_hccl_backend(
    store: _torch_private.Store, rank: int, size: int, timeout: datetime.timedelta
) -> dist.Backend:
    return native().make_hccl_backend(dist.ProcessGroupGloo(store, rank, size, timeout))
