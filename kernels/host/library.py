"""The shared library of the host kernels: finding it, and calling its C functions."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import warnings
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HostLibrary", "TensorTable", "is_available", "load"]

_NAME = "_host_kernels"
_INSTRUCTION_SET_VARIABLE = "HYPER_PARALLEL_HOST_ISA"
_INVALID_ARGUMENT = 1  # HyperHostStatus


class _Tensors(ctypes.Structure):
    """HyperHostTensors."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_void_p),
        ("format", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class TensorTable:
    """Tensors as the kernels see them, one entry each in three arrays.

    Attributes:
        addresses: uint64; of memory that outlives the call.
        numels: int64.
        formats: HyperHostFormat, a byte each.
    """

    addresses: array[int]
    numels: array[int]
    formats: bytes

    def __len__(self) -> int:
        return len(self.addresses)

    def as_argument(self) -> _Tensors:
        """Return the C structure, which points into this table."""
        address, count = self.addresses.buffer_info()
        return _Tensors(count, address, self.numels.buffer_info()[0], self.formats)


class HostLibrary:
    """The C functions of csrc/host_kernels.h, with their errors raised.

    ctypes releases the GIL around each call.

    Args:
        path: The shared library.

    Raises:
        OSError: If it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        tensors = ctypes.POINTER(_Tensors)
        self._partial_norms = _function(
            library.hyper_host_partial_norms,
            (tensors, ctypes.c_double, ctypes.c_int32, ctypes.c_char_p),
        )
        self._exact_sums_of_squares = _function(
            library.hyper_host_exact_sums_of_squares, (tensors, ctypes.c_int32, ctypes.c_char_p)
        )
        self._scale = _function(
            library.hyper_host_scale, (tensors, ctypes.c_double, ctypes.c_int32)
        )
        self._read = _function(library.hyper_host_read, (tensors, ctypes.c_int32))
        self._read_and_write = _function(
            library.hyper_host_read_and_write, (tensors, ctypes.c_int32)
        )
        self._use_instruction_set = _function(
            library.hyper_host_use_instruction_set, (ctypes.c_char_p,)
        )
        self._instruction_sets = library.hyper_host_instruction_sets
        self._instruction_sets.restype = ctypes.c_char_p
        self._last_error = library.hyper_host_last_error
        self._last_error.restype = ctypes.c_char_p

    def partial_norms(
        self, table: TensorTable, norm_type: float, num_threads: int, results: bytearray
    ) -> None:
        """Fill `results` with a HyperHostNorm for each tensor."""
        status = self._partial_norms(
            table.as_argument(), norm_type, num_threads, _address_of(results)
        )
        self._raise_for(status)

    def exact_sums_of_squares(
        self, table: TensorTable, num_threads: int, results: bytearray
    ) -> None:
        """Fill `results` with a HyperHostExactSum for each tensor."""
        status = self._exact_sums_of_squares(table.as_argument(), num_threads, _address_of(results))
        self._raise_for(status)

    def scale(self, table: TensorTable, factor: float, num_threads: int) -> None:
        """Multiply in place."""
        self._raise_for(self._scale(table.as_argument(), factor, num_threads))

    def read(self, table: TensorTable, num_threads: int) -> None:
        """Read all memory."""
        self._raise_for(self._read(table.as_argument(), num_threads))

    def read_and_write(self, table: TensorTable, num_threads: int) -> None:
        """Read all memory and write it back."""
        self._raise_for(self._read_and_write(table.as_argument(), num_threads))

    def instruction_sets(self) -> tuple[str, ...]:
        """Return the names of those that can be used here, best first."""
        names: bytes = self._instruction_sets()
        return tuple(names.decode().split())

    def use_instruction_set(self, name: str) -> None:
        """Use one of them from now on; `auto` for the best."""
        self._raise_for(self._use_instruction_set(name.encode()))

    def _raise_for(self, status: int) -> None:
        if status == 0:
            return
        message: bytes = self._last_error()
        kind = ValueError if status == _INVALID_ARGUMENT else RuntimeError
        raise kind(f"host kernels: {message.decode()}")


def is_available() -> bool:
    """Tell whether there are host kernels; the first time that there are none, warn."""
    return isinstance(_load_once(), HostLibrary)


def load() -> HostLibrary:
    """Return the library.

    Raises:
        RuntimeError: If there is none; `is_available` told.
    """
    library = _load_once()
    if isinstance(library, HostLibrary):
        return library
    raise RuntimeError(f"there are no host kernels: {library}")


@functools.cache
def _load_once() -> HostLibrary | str:
    """Return the library, or why there is none."""
    try:
        library = HostLibrary(_find(Path(__file__).parent))
    except OSError as error:
        warnings.warn(
            f"gradients in host memory are measured and scaled with torch operators, which is "
            f"right but slower: there are no host kernels ({error}). Install a C++17 "
            "compiler (Debian: apt-get install g++) and install hyper_parallel anew",
            RuntimeWarning,
            stacklevel=2,
        )
        return str(error)
    library.use_instruction_set(os.environ.get(_INSTRUCTION_SET_VARIABLE, "auto"))
    return library


def _find(folder: Path) -> Path:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{_NAME}{suffix}"
        if path.exists():
            return path
    raise FileNotFoundError(f"no {_NAME} was built into {folder}")


def _function(function: Callable[..., int], argument_types: tuple[type, ...]) -> Callable[..., int]:
    function.argtypes = argument_types  # type: ignore[attr-defined]
    function.restype = ctypes.c_int32  # type: ignore[attr-defined]
    return function


def _address_of(buffer: bytearray) -> ctypes.Array[ctypes.c_char] | None:
    return (ctypes.c_char * len(buffer)).from_buffer(buffer) if buffer else None
