"""Tensors of any strides to pieces small enough to be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEVICE_CHUNK_NUMEL", "HOST_CHUNK_NUMEL", "chunk_numel", "chunks"]

# 512 KiB as float64: stays in the second-level cache between conversion and dot product, and is
# under 1 % of any shard that is large enough to matter.
HOST_CHUNK_NUMEL = 1 << 16
# A kernel launch has to be worth its while, and 32 MiB of scratch is little on a device.
DEVICE_CHUNK_NUMEL = 1 << 22


def chunk_numel(tensor: torch.Tensor) -> int:
    """Return how long chunks of a tensor should be."""
    return HOST_CHUNK_NUMEL if tensor.device.type == "cpu" else DEVICE_CHUNK_NUMEL


def chunks(tensor: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Cut a tensor of any strides into pieces of at most `numel` elements, without copying it."""
    if tensor.numel() <= numel:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), numel)
    else:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        for piece in torch.split(tensor, -(-tensor.shape[longest] // 2), dim=longest):
            yield from chunks(piece, numel)
