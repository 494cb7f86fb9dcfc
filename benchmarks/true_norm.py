"""The norm of a case's gradients to 1e-11, and that of what a clip left of them.

Not by any code under test: float64 dot products over chunks of 64 Ki elements, added up with
`math.fsum`. Squares of float32 are exact in float64, so a chunk's sum of n <= 2^16 terms has a
relative error below 2^16 * 2^-53 < 1e-11, and the fsum of the chunks none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["WRONG_ABOVE", "relative_error", "true_norm"]

WRONG_ABOVE = 1e-5
"""Relative error from which a norm is called wrong: some 100 units in the last place of float32.

Sums of a few million float32 terms that are added carefully stay well below it.
"""

_CHUNK_NUMEL = 1 << 16


def true_norm(
    grads: Sequence[torch.Tensor], counted: Sequence[bool], group: dist.ProcessGroup
) -> float:
    """Return the 2-norm over all ranks.

    Args:
        grads: This rank's shards, on the host.
        counted: Which of them are to be counted here; of the copies of a shard one is.
        group: All ranks, reduces objects.

    Ranks: all of the group.
    """
    own = [sum_of_squares(grad) for grad, counts in zip(grads, counted, strict=True) if counts]
    of_all: list[list[float]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_all, own, group=group)
    return math.sqrt(math.fsum(value for values in of_all for value in values))


def sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of squares of one tensor."""
    chunks = torch.split(tensor.detach().reshape(-1), _CHUNK_NUMEL)
    return math.fsum(float(torch.dot(c, c)) for c in map(torch.Tensor.double, chunks))


def relative_error(value: float, reference: float) -> float:
    """Return |value / reference - 1|; inf where `value` is no number."""
    return abs(value / reference - 1) if math.isfinite(value) else math.inf
