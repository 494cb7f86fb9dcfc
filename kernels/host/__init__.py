"""Norms and scaling of tensors in host memory, at the speed of that memory.

Each function takes any number of tensors and makes one pass over them, on as many threads as
`threads.num_threads` says, without the GIL. Results depend neither on the number of threads nor on
the instruction set. The contract in full: csrc/host_kernels.h.

The kernels are C++ behind a C interface, built when the package is installed. Without a compiler
there are none: then `is_available()` is False, and says so in one warning.
"""

from __future__ import annotations

import operator
import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

from .library import TensorTable, is_available, load
from .threads import num_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Tensors = Sequence[torch.Tensor] | TensorTable

__all__ = [
    "EXACT_DTYPES",
    "EXACT_EXPONENT",
    "ExactSum",
    "ExactSums",
    "HostNorms",
    "TensorTable",
    "exact_sums_of_squares",
    "instruction_sets",
    "is_available",
    "num_threads",
    "pack",
    "partial_norms",
    "read",
    "read_and_write",
    "scale_",
    "use_instruction_set",
]

EXACT_EXPONENT = -298
"""Exact sums count units of 2 to this power: the square of float32's smallest number."""

EXACT_DTYPES = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32)
)
"""What can be summed exactly."""

# HyperHostFormat. A complex number is two real ones.
_FORMATS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.complex64: 0,
    torch.complex32: 2,
    torch.complex128: 3,
}
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_NORM_BYTES = 56  # of HyperHostNorm
_EXACT_SUM = struct.Struct("=80s2q")  # HyperHostExactSum
_dtype_of = operator.attrgetter("dtype")


class HostNorms:
    """What one pass over tensors says of them: columns with an entry for each tensor.

    Args:
        results: HyperHostNorm of each tensor.
    """

    _NUM_FIELDS = 7

    def __init__(self, results: bytearray) -> None:
        self._floats = memoryview(results).cast("d")
        self._ints = memoryview(results).cast("q")

    @property
    def sums_of_squares(self) -> list[float]:
        """In float64; NaN or infinite if an element is."""
        return list(self._floats[0 :: self._NUM_FIELDS])

    @property
    def max_abs(self) -> list[float]:
        """Largest magnitudes, NaN if any element is."""
        return list(self._floats[1 :: self._NUM_FIELDS])

    @property
    def pow_sums(self) -> list[float]:
        """Sums of |x|^p for norm types other than 0, 2, inf and -inf; else 0."""
        return list(self._floats[2 :: self._NUM_FIELDS])

    @property
    def min_abs(self) -> list[float]:
        """Smallest magnitudes for norm type -inf, NaN if any element is; else infinite."""
        return list(self._floats[3 :: self._NUM_FIELDS])

    @property
    def num_nonzero(self) -> list[int]:
        """For norm type 0, NaN counting as nonzero; else 0."""
        return list(self._ints[4 :: self._NUM_FIELDS])

    @property
    def num_nan(self) -> list[int]:
        """NaN elements."""
        return list(self._ints[5 :: self._NUM_FIELDS])

    @property
    def num_inf(self) -> list[int]:
        """Infinite elements."""
        return list(self._ints[6 :: self._NUM_FIELDS])


class ExactSum(NamedTuple):
    """A sum of squares without any rounding.

    Attributes:
        units: In units of 2^EXACT_EXPONENT; 0 if an element is NaN or infinite.
        num_nan: NaN elements.
        num_inf: Infinite elements.
    """

    units: int
    num_nan: int
    num_inf: int


class ExactSums:
    """One `ExactSum` for each tensor, made when it is asked for.

    Args:
        results: HyperHostExactSum of each tensor.
    """

    def __init__(self, results: bytearray) -> None:
        self._results = results

    def __len__(self) -> int:
        return len(self._results) // _EXACT_SUM.size

    def __iter__(self) -> Iterator[ExactSum]:
        for words, num_nan, num_inf in _EXACT_SUM.iter_unpack(self._results):
            yield ExactSum(int.from_bytes(words, "little"), num_nan, num_inf)


def pack(tensors: Sequence[torch.Tensor]) -> TensorTable:
    """Return the table of tensors that the other functions make of a list, to be used repeatedly.

    It holds addresses only: the tensors must live, and keep their memory, as long as it is used.
    """
    dtypes = list(map(_dtype_of, tensors))
    numels = array("q", list(map(torch.Tensor.numel, tensors)))
    if not _COMPLEX.isdisjoint(dtypes):
        pairs = zip(numels, dtypes, strict=True)
        numels = array("q", [numel * (1 + (dtype in _COMPLEX)) for numel, dtype in pairs])
    addresses = array("Q", list(map(torch.Tensor.data_ptr, tensors)))
    return TensorTable(addresses, numels, bytes(map(_FORMATS.__getitem__, dtypes)))


def partial_norms(tensors: Tensors, norm_type: float) -> HostNorms:
    """Measure each tensor.

    Accuracy: sums have a relative error below 2^-42, whatever the size. Powers other than whole
    ones up to 64 are the C library's.

    Args:
        tensors: On the CPU, strided, their elements dense in memory in any order; float32,
            bfloat16, float16 or float64, or complex for norm type 2, where parts count as elements.
        norm_type: Any p >= 0, inf or -inf.

    Raises:
        RuntimeError: If there are no kernels or they fail.
    """
    table = _table_of(tensors)
    results = bytearray(_NORM_BYTES * len(table))
    load().partial_norms(table, norm_type, num_threads(), results)
    return HostNorms(results)


def exact_sums_of_squares(tensors: Tensors) -> ExactSums:
    """Sum the squares of each tensor without rounding, so that no order of elements matters.

    Args:
        tensors: As for `partial_norms`, of `EXACT_DTYPES`.

    Raises:
        RuntimeError: If there are no kernels or they fail.
        ValueError: If a tensor is of another dtype.
    """
    table = _table_of(tensors)
    results = bytearray(_EXACT_SUM.size * len(table))
    load().exact_sums_of_squares(table, num_threads(), results)
    return ExactSums(results)


def scale_(tensors: Tensors, factor: float) -> None:
    """Multiply each tensor in place, in float32 arithmetic (float64 for float64), rounded once.

    Args:
        tensors: As for `partial_norms`, complex ones included; they must not overlap. Of a table's
            tensors autograd does not learn that they changed.
        factor: Any number.

    Raises:
        RuntimeError: If there are no kernels or they fail.
    """
    load().scale(_table_of(tensors), factor, num_threads())
    if isinstance(tensors, TensorTable):
        return
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(tracked)


def read(tensors: Tensors) -> None:
    """Read the tensors' memory as fast as is known: the limit of `partial_norms`."""
    load().read(_table_of(tensors), num_threads())


def read_and_write(tensors: Tensors) -> None:
    """Read and write back the tensors' memory as fast as is known: the limit of `scale_`."""
    load().read_and_write(_table_of(tensors), num_threads())


def instruction_sets() -> tuple[str, ...]:
    """Return the names of those that this processor can run and there are kernels for, best first.

    Raises:
        RuntimeError: If there are no kernels.
    """
    return load().instruction_sets()


def use_instruction_set(name: str) -> None:
    """Use one of `instruction_sets()` from now on, or the best again with `auto`.

    For tests, as is the environment variable HYPER_PARALLEL_HOST_ISA: results are the same.

    Raises:
        RuntimeError: If there are no kernels.
        ValueError: If it is none of them.
    """
    load().use_instruction_set(name)


def _table_of(tensors: Tensors) -> TensorTable:
    return tensors if isinstance(tensors, TensorTable) else pack(tensors)
