"""The module that becomes `torch.npu`: the surface that `torch.cuda` and torch_npu share."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.testing.simnpu._native import Native

__all__ = ["make_device_module"]

# What torch and its users pass for a device; None means the current one.
_DeviceLike = torch.device | str | int | None

_DEVICE_TYPE = "npu"
_DEVICE_NAME = "Simulated NPU"
_TOTAL_MEMORY_BYTES = 64 * 2**30
_PRIVATEUSE1 = 20  # c10::DeviceType::PrivateUse1


class Stream(torch.Stream):
    """A stream of a simulated NPU, of the current one if `device` is None."""

    def __new__(cls, device: _DeviceLike = None, priority: int = 0, **existing: int) -> Stream:
        """Make a new stream, or wrap the one that `existing` identifies."""
        if existing:
            return super().__new__(cls, **existing)
        index = (
            torch.accelerator.current_device_index() if device is None else _explicit_index(device)
        )
        return super().__new__(cls, device=torch.device(_DEVICE_TYPE, index), priority=priority)


class stream:  # noqa: N801 - torch.cuda.stream's name
    """Context in which a stream is the current one; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._previous: torch.Stream | None = None

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._previous = torch.accelerator.current_stream()
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            torch.accelerator.set_stream(self._previous)


class device:  # noqa: N801 - torch.cuda.device's name
    """Context in which a device is the current one."""

    def __init__(self, device: _DeviceLike) -> None:
        self._index = (
            torch.accelerator.current_device_index() if device is None else _explicit_index(device)
        )
        self._previous = self._index

    def __enter__(self) -> None:
        self._previous = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *exception: object) -> None:
        torch.accelerator.set_device_index(self._previous)


def _explicit_index(device: torch.device | str | int) -> int:
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _wrap_stream(existing: torch.Stream) -> Stream:
    return Stream(
        stream_id=existing.stream_id,
        device_index=existing.device_index,
        device_type=existing.device_type,
    )


def make_device_module(native: Native) -> types.ModuleType:
    """Return the module to register as `torch.npu`."""

    def resolve(device: _DeviceLike) -> int:
        return native.current_device() if device is None else _explicit_index(device)

    module = types.ModuleType("torch.npu", "Simulated NPUs; see hyper_parallel.testing.simnpu.")
    for functions in (
        _lifecycle_functions(),
        _device_functions(native, resolve),
        _stream_functions(native, resolve),
        _memory_functions(native),
        _random_functions(native, resolve),
    ):
        for name, value in functions.items():
            setattr(module, name, value)
    return module


def _make_event_class(native: Native) -> type[torch.Event]:
    class Event(torch.Event):
        """An event of a simulated NPU."""

        def __new__(
            cls,
            enable_timing: bool = False,  # noqa: FBT001, FBT002 - torch.cuda.Event's signature
            blocking: bool = False,  # noqa: FBT001, FBT002
            interprocess: bool = False,  # noqa: FBT001, FBT002
        ) -> Event:
            """Make an event that is not recorded yet."""
            if interprocess:
                raise ValueError("simulated NPUs have no interprocess events")
            return super().__new__(
                cls, device=_DEVICE_TYPE, enable_timing=enable_timing, blocking=blocking
            )

        def elapsed_time(self, end_event: torch.Event) -> float:
            """Return simulated milliseconds from this event to `end_event`."""
            # torch's own refuses events of a subclass.
            return native.elapsed_ms(self.event_id, end_event.event_id)

    return Event


_Resolve = Callable[[_DeviceLike], int]
_Functions = dict[str, Any]


def _lifecycle_functions() -> _Functions:
    """Names that torch looks up to learn whether the device can be used."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_initialized": True,
        "_lazy_init": lambda: None,
        # A fork is fine: the simulator has no threads of its own.
        "_is_in_bad_fork": lambda: False,
    }


def _device_functions(native: Native, resolve: _Resolve) -> _Functions:
    def get_device_properties(device: _DeviceLike = None) -> types.SimpleNamespace:
        resolve(device)
        return types.SimpleNamespace(name=_DEVICE_NAME, total_memory=_TOTAL_MEMORY_BYTES)

    return {
        "device": device,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(resolve(device)),
        "synchronize": lambda device=None: native.synchronize(resolve(device)),
        "get_device_name": lambda _device=None: _DEVICE_NAME,
        "get_device_properties": get_device_properties,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
    }


def _stream_functions(native: Native, resolve: _Resolve) -> _Functions:
    def current_stream(device: _DeviceLike = None) -> Stream:
        return _wrap_stream(torch.accelerator.current_stream(resolve(device)))

    def default_stream(device: _DeviceLike = None) -> Stream:
        return Stream(stream_id=0, device_index=resolve(device), device_type=_PRIVATEUSE1)

    return {
        "Stream": Stream,
        "Event": _make_event_class(native),
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": torch.accelerator.set_stream,
    }


def _memory_functions(native: Native) -> _Functions:
    """Sizes are those of the whole process: the simulator does not tell devices apart."""

    def level(name: str) -> Callable[..., int]:
        return lambda _device=None: native.counters()[name]

    def mem_get_info(_device: _DeviceLike = None) -> tuple[int, int]:
        return _TOTAL_MEMORY_BYTES - native.counters()["device_bytes"], _TOTAL_MEMORY_BYTES

    return {
        "memory_allocated": level("device_bytes"),
        "memory_reserved": level("device_bytes"),
        "max_memory_allocated": level("device_bytes_peak"),
        "max_memory_reserved": level("device_bytes_peak"),
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: None,
    }


def _random_functions(native: Native, resolve: _Resolve) -> _Functions:
    def manual_seed(seed: int) -> None:
        native.default_generator(native.current_device()).manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.default_generator(index).manual_seed(seed)

    def get_rng_state(device: _DeviceLike = None) -> torch.Tensor:
        return native.default_generator(resolve(device)).get_state()

    def set_rng_state(state: torch.Tensor, device: _DeviceLike = None) -> None:
        native.default_generator(resolve(device)).set_state(state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }
