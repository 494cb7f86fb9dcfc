"""torchtitan's clip."""

from __future__ import annotations

import torch

from .adapter import Adapter

__all__ = ["Torchtitan"]


class Torchtitan(Adapter):
    """`torchtitan.distributed.utils.clip_grad_norm_`, as its trainer calls it."""

    name = "torchtitan"
    package = "torchtitan"
    modules = ("torchtitan.distributed.utils",)

    def clip(self) -> torch.Tensor:
        from torchtitan.distributed.utils import clip_grad_norm_

        norm: torch.Tensor = clip_grad_norm_(
            self.case.parameters,
            self.case.max_norm,
            foreach=True,
            ep_enabled=self.case.has_mesh_dim("ep"),
        )
        return norm
