"""Sizes of the gradient shards that benchmarks measure."""

from __future__ import annotations

import math
import random

__all__ = ["LAYOUTS", "kimi_k2_shapes", "kimi_k2_shards", "sizes_of"]

LAYOUTS = ("flat", "kimi_k2", "mixed400", "small5000")

# Kimi-K2: 61 layers, the first dense, 384 experts; on 128 ranks, FSDP for what is dense, expert
# parallel for the experts.
_NUM_LAYERS = 61
_NUM_RANKS = 128
_HIDDEN = 7168
_EXPERTS = 384
_EXPERT_HIDDEN = 2048
_DENSE_HIDDEN = 18432
_VOCABULARY = 163840
_HEADS = 64


def kimi_k2_shapes(narrow: int = 1) -> list[tuple[int, ...]]:
    """Return the shapes of all 915 parameters: 1.03e12 elements in all, the experts' stacked.

    Args:
        narrow: What every size but the numbers of layers and experts is divided by; 1 to 64.
    """
    hidden = _HIDDEN // narrow
    shapes: list[tuple[int, ...]] = [(_VOCABULARY // narrow, hidden), (hidden,)]
    shapes.append((_VOCABULARY // narrow, hidden))
    for layer in range(_NUM_LAYERS):
        shapes += [
            (1536 // narrow, hidden),
            (1536 // narrow,),
            (_HEADS * 192 // narrow, 1536 // narrow),
            (576 // narrow, hidden),
            (512 // narrow,),
            (_HEADS * 256 // narrow, 512 // narrow),
            (hidden, _HEADS * 128 // narrow),
            (hidden,),
            (hidden,),
        ]
        inner = (_DENSE_HIDDEN if layer == 0 else _EXPERT_HIDDEN) // narrow
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        if layer > 0:
            shapes += [(_EXPERTS, hidden), (_EXPERTS, 2 * inner, hidden), (_EXPERTS, hidden, inner)]
    return shapes


def kimi_k2_shards() -> list[int]:
    """Return the number of elements of each of rank 0's 915 gradient shards: 8.0e9 in all."""
    # Both ways of sharding cut the first dimension.
    return [-(-shape[0] // _NUM_RANKS) * math.prod(shape[1:]) for shape in kimi_k2_shapes()]


def sizes_of(layout: str, shrink: int = 1) -> list[int]:
    """Return the numbers of elements of a layout's tensors, divided by `shrink`."""
    if layout == "flat":
        sizes = [64 << 20]
    elif layout == "kimi_k2":
        sizes = [size // 64 for size in kimi_k2_shards()]
    elif layout == "mixed400":
        generator = random.Random(1)
        weights = [10 ** generator.uniform(2.5, 6.5) for _ in range(400)]
        sizes = [max(300, int(weight / sum(weights) * (64 << 20))) for weight in weights]
    else:
        sizes = [2000] * 5000
    return [max(1, size // shrink) for size in sizes]
