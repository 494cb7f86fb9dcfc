"""accelerate's clip, and those of transformers and axolotl, which build on it."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from .adapter import Adapter

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["Accelerate", "Axolotl", "Transformers"]


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Accelerate(Adapter):
    """`Accelerator.clip_grad_norm_`."""

    name = "accelerate"
    package = "accelerate"
    modules = ("accelerate",)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)

    def clip(self) -> torch.Tensor:
        accelerator: Any = self._accelerator
        return _whole(accelerator.clip_grad_norm_(self.case.parameters, self.case.max_norm))


class Transformers(Adapter):
    """What `transformers.Trainer` does each step."""

    name = "transformers"
    package = "transformers"
    modules = ("transformers.trainer",)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from transformers import Trainer, TrainingArguments

        class Arguments(TrainingArguments):  # type: ignore[misc]
            # So it is under FSDP, too: the model is where it shall be.
            place_model_on_device = False

        arguments = Arguments(
            output_dir=tempfile.gettempdir(),
            max_grad_norm=case.max_norm,
            use_cpu=True,
            report_to=[],
        )
        self._trainer = Trainer(model=case.module, args=arguments)

    def clip(self) -> torch.Tensor:
        trainer: Any = self._trainer
        return _whole(trainer._clip_grad_norm(self.case.module))  # noqa: SLF001


class Axolotl(Accelerate):
    """axolotl's own clip where experts are parallel, else accelerate's, as its patch decides."""

    name = "axolotl"
    package = "axolotl"
    modules = ("axolotl.monkeypatch.accelerate.parallelism_config",)

    def clip(self) -> torch.Tensor:
        if not self.case.has_mesh_dim("ep"):
            return super().clip()
        from axolotl.monkeypatch.accelerate import parallelism_config

        clip: Any = parallelism_config._ep_aware_clip_grad_norm  # noqa: SLF001
        return _whole(clip(self.case.parameters, self.case.max_norm))
