"""NeMo Automodel's clip."""

from __future__ import annotations

import torch

from .adapter import Adapter

__all__ = ["NemoAutomodel"]


class NemoAutomodel(Adapter):
    """`clip_grad_norm` of its training utilities, over the module's parameters."""

    name = "nemo-automodel"
    package = "nemo-automodel"
    modules = ("nemo_automodel.components.training.utils",)

    def clip(self) -> torch.Tensor | float:
        from nemo_automodel.components.training.utils import clip_grad_norm

        norm: torch.Tensor | float = clip_grad_norm(self.case.max_norm, [self.case.module])
        return norm
