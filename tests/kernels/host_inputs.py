"""Tensors with any bits at any address, and ways to run the host kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from hyper_parallel.kernels import host

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXACT_DTYPES = DTYPES[:3]
INSTRUCTION_SETS = host.instruction_sets() if host.is_available() else ()

# Around the 8 lanes of a vector, the 32 of a block, a cache line and a chunk.
SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000]
CHUNK_SIZES = [16383, 16384, 16385, 65535, 65536, 65537, 131_077]

_INT_OF = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}
# Where the exponent field ends: sign and exponent bits are above.
_FRACTION_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.float64: 52}


def normal(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype)


def any_bits(numel: int, dtype: torch.dtype, seed: int, *, finite: bool) -> torch.Tensor:
    """Return elements of random bits: every exponent alike, so many huge, tiny and special ones."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(_INT_OF[dtype])
    bits = torch.randint(info.min, info.max, (numel,), generator=generator, dtype=_INT_OF[dtype])
    tensor = bits.view(dtype)
    return (
        torch.where(tensor.isfinite(), tensor, torch.zeros((), dtype=dtype)) if finite else tensor
    )


def subnormal(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return subnormal numbers of both signs."""
    generator = torch.Generator().manual_seed(seed)
    most = 1 << _FRACTION_BITS[dtype]
    bits = torch.randint(1, most, (numel,), generator=generator).to(_INT_OF[dtype])
    signs = 1 - 2 * torch.randint(0, 2, (numel,), generator=generator)
    return bits.view(dtype) * signs.to(dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INT_OF[tensor.dtype])


def at_offset(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Copy a flat tensor to an address `offset` elements after an aligned one."""
    moved = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:]
    return moved.copy_(tensor)


@contextlib.contextmanager
def running(instruction_set: str = "auto", num_threads: int = 1) -> Iterator[None]:
    """Use these inside the block."""
    before = os.environ.get("HYPER_PARALLEL_NUM_THREADS")
    os.environ["HYPER_PARALLEL_NUM_THREADS"] = str(num_threads)
    host.use_instruction_set(instruction_set)
    try:
        yield
    finally:
        host.use_instruction_set("auto")
        del os.environ["HYPER_PARALLEL_NUM_THREADS"]
        if before is not None:
            os.environ["HYPER_PARALLEL_NUM_THREADS"] = before
