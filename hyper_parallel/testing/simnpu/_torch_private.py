"""Everything this package takes from torch without a public name for it."""

from __future__ import annotations

import types

import torch
from torch._C._distributed_c10d import Store

__all__ = ["Store", "register_device_module"]


def register_device_module(device_type: str, module: types.ModuleType) -> None:
    """Make `torch.<device_type>` be `module`; torch's documented way for out-of-tree devices."""
    torch._register_device_module(device_type, module)  # type: ignore[no-untyped-call]  # noqa: SLF001
