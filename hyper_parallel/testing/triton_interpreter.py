"""Triton's interpreter made right and quick, and able to run kernels on simulated device memory.

The interpreter (`TRITON_INTERPRET=1`) of triton-ascend 3.2 truncates where it should round to
bfloat16, misreads that type's subnormals, takes a maximum element by element in Python, does its
set-up anew in every call of a function, and lets NumPy warn of infinities, as no device does.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DeviceMemory", "is_wanted", "prepare", "run_on_device_memory"]

_VARIABLE = "TRITON_INTERPRET"


class DeviceMemory(Protocol):
    """How the interpreter reaches the memory of a simulated device."""

    DEVICE_ADDRESS_BIT: int
    """Set in every device address; without it, it is an address in this process."""

    def begin_kernel(self) -> None:
        """Count a launch, and run what the current stream has queued before it."""

    def is_pinned_address(self, address: int) -> bool:
        """Tell whether a device may read and write the host memory at an address."""


def is_wanted() -> bool:
    """Tell whether Triton is installed and asked to interpret."""
    return os.environ.get(_VARIABLE) == "1" and importlib.util.find_spec("triton") is not None


@functools.cache
def prepare() -> None:
    """Correct and quicken the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    # triton-ascend gives tl.max another combining function than the one with a quick path.
    maximum = getattr(tl.max, "fn", tl.max).__globals__.get("_elementwise_max_default")
    if maximum is not None:
        interpreter._patch_lang = functools.cache(interpreter._patch_lang)  # noqa: SLF001
        tl.standard._elementwise_max = maximum  # noqa: SLF001
    executor = interpreter.GridExecutor
    executor.__call__ = _without_warnings(executor.__call__)
    builder = type(interpreter.interpreter_builder)
    builder.cast_impl = _exact_about_bfloat16(builder.cast_impl, interpreter.TensorHandle)


def run_on_device_memory(device_type: str, memory: DeviceMemory) -> None:
    """Let kernels whose arguments are on a device work on its memory in place.

    Does nothing unless `is_wanted()`. Kernels may read and write device memory and pinned host
    memory, and raise on any other.

    Args:
        device_type: As in `torch.device.type`.
        memory: The device's.
    """
    if not is_wanted():
        return
    prepare()
    from triton.runtime import interpreter

    checked = _CheckedMemory(interpreter._interpreter, memory)  # noqa: SLF001
    interpreter._interpreter = checked  # noqa: SLF001
    executor = interpreter.GridExecutor
    copy_in, copy_out = executor._init_args_hst, executor._restore_args_dev  # noqa: SLF001

    def is_on_device(args: Sequence[object], kwargs: dict[str, object]) -> bool:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        return any(tensor.device.type == device_type for tensor in tensors)

    def enter(self: object, args: Sequence[object], kwargs: dict[str, object]) -> Any:
        checked.is_on_device = is_on_device(args, kwargs)
        if not checked.is_on_device:
            return copy_in(self, args, kwargs)
        memory.begin_kernel()
        return list(args), dict(kwargs)

    def leave(self: object, args: Any, args_h: Any, kwargs: Any, kwargs_h: Any) -> None:
        if not is_on_device(args, kwargs):
            copy_out(self, args, args_h, kwargs, kwargs_h)

    executor._init_args_hst, executor._restore_args_dev = enter, leave  # noqa: SLF001


class _CheckedMemory:
    """The interpreter's loads and stores.

    Attributes:
        is_on_device: Whether the kernel that runs has arguments on the device.
    """

    is_on_device = False

    def __init__(self, real: Any, memory: DeviceMemory) -> None:
        self._real = real
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        return self._real.load(self._translate(pointers, mask), mask, *rest)

    def store(self, pointers: Any, values: Any, mask: Any) -> None:
        self._real.store(self._translate(pointers, mask), values, mask)

    def _translate(self, pointers: Any, mask: Any) -> Any:
        """Return where the bytes are."""
        if not self.is_on_device:
            return pointers
        import numpy as np

        bit = np.uint64(self._memory.DEVICE_ADDRESS_BIT)
        pointers = np.asarray(pointers, dtype=np.uint64)
        live = pointers[np.broadcast_to(np.asarray(mask, dtype=bool), pointers.shape)]
        for address in np.unique(live[(live & bit) == 0]).tolist():
            if not self._memory.is_pinned_address(address):
                raise RuntimeError("npu: a kernel accessed host memory that is not pinned")
        return pointers & ~bit


def _without_warnings(call: Any) -> Any:
    @functools.wraps(call)
    def quietly(*args: Any, **kwargs: Any) -> Any:
        import numpy as np

        with np.errstate(all="ignore"), warnings.catch_warnings():
            # It makes numbers of arrays with one element, until NumPy 2.4 forbids it.
            warnings.simplefilter("ignore", DeprecationWarning)
            return call(*args, **kwargs)

    return quietly


def _exact_about_bfloat16(cast: Any, handle: Any) -> Any:
    """Return the interpreter's cast, but between float32 and bfloat16 as torch does it."""
    import triton.language as tl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16)
            return handle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            bits = torch.from_numpy(source.data.copy()).view(torch.bfloat16)
            return handle(bits.to(torch.float32).numpy(), tl.float32)
        return cast(self, source, target)

    return cast_impl
