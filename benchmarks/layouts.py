"""Sizes of the gradient shards that benchmarks measure."""

from __future__ import annotations

import math
import random

__all__ = ["LAYOUTS", "kimi_k2_shards", "sizes_of"]

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


def kimi_k2_shards() -> list[int]:
    """Return the number of elements of each of rank 0's 915 gradient shards: 8.0e9 in all."""
    whole = [(_VOCABULARY, _HIDDEN), (_HIDDEN,), (_VOCABULARY, _HIDDEN)]
    for layer in range(_NUM_LAYERS):
        whole += [
            (1536, _HIDDEN),
            (1536,),
            (_HEADS * 192, 1536),
            (576, _HIDDEN),
            (512,),
            (_HEADS * 256, 512),
            (_HIDDEN, _HEADS * 128),
            (_HIDDEN,),
            (_HIDDEN,),
        ]
        inner = _DENSE_HIDDEN if layer == 0 else _EXPERT_HIDDEN
        whole += [(inner, _HIDDEN), (inner, _HIDDEN), (_HIDDEN, inner)]
        if layer > 0:
            whole.append((_EXPERTS, _HIDDEN))
            whole += [
                (_EXPERTS, 2 * _EXPERT_HIDDEN, _HIDDEN),
                (_EXPERTS, _HIDDEN, _EXPERT_HIDDEN),
            ]
    # Both ways of sharding cut the first dimension.
    return [-(-shape[0] // _NUM_RANKS) * math.prod(shape[1:]) for shape in whole]


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
