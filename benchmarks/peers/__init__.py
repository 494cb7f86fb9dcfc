"""Who clips: us, torch, and other training libraries, each by an adapter of a few lines."""

from __future__ import annotations

from .adapter import Adapter
from .early_norm import HyperParallelEarlyNorm, HyperParallelNoHostPass
from .hugging_face import Accelerate, Axolotl, Transformers
from .nemo_automodel_peer import NemoAutomodel
from .ours import HyperParallel, HyperParallelOptimizer
from .scalar_hop import ScalarHop
from .torch_clip import Fsdp1, Torch
from .torchtitan_peer import Torchtitan

__all__ = ["METHODS", "Adapter"]

_ADAPTERS: tuple[type[Adapter], ...] = (
    HyperParallel,
    HyperParallelOptimizer,
    HyperParallelEarlyNorm,
    HyperParallelNoHostPass,
    ScalarHop,
    Torch,
    Fsdp1,
    Torchtitan,
    NemoAutomodel,
    Accelerate,
    Transformers,
    Axolotl,
)
METHODS = {adapter.name: adapter for adapter in _ADAPTERS}
