"""The compiled half as Python sees it (csrc/bindings.cpp)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist

__all__ = ["MODULE_NAME", "Native", "load"]

MODULE_NAME = "hyper_parallel_simnpu"


class Native(Protocol):
    """The functions of the extension module."""

    DEVICE_ADDRESS_BIT: int

    def init(self, num_devices: int) -> None: ...
    def configure(
        self,
        copy_us: float,
        copy_us_per_mib: float,
        collective_us: float,
        collective_us_per_mib: float,
        trace_ops: bool,  # noqa: FBT001 - the C++ function's order
        poison: bool,  # noqa: FBT001
    ) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def reset_counters(self) -> None: ...
    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def set_device(self, index: int) -> None: ...
    def synchronize(self, device: int) -> None: ...
    def elapsed_ms(self, start_event_id: int, end_event_id: int) -> float: ...
    def begin_kernel(self) -> None: ...
    def is_pinned_address(self, address: int) -> bool: ...
    def default_generator(self, device: int) -> torch.Generator: ...
    def make_hccl_backend(self, gloo: dist.ProcessGroupGloo) -> dist.Backend: ...


def load(library: Path) -> Native:
    """Load the compiled module. Once per process: it registers operators with torch."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(library))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, library, loader=loader)
    if spec is None:
        raise RuntimeError(f"cannot load the simulated NPU from {library}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast(Native, module)
