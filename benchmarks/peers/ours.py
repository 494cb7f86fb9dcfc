"""This repository's clip, all in the clip or with the scaling left to the optimizer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import hyper_parallel
from hyper_parallel.platform.torch import clip_grad

from .adapter import Adapter

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["ClipForOptimizer", "HyperParallel", "HyperParallelOptimizer"]


class HyperParallel(Adapter):
    """`NormReducer.clip_`: what `clip_grad_norm_` does, and its timings."""

    name = "hyper_parallel"
    is_peer = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._reducer = hyper_parallel.NormReducer()

    def clip(self) -> torch.Tensor:
        return self._clip().total_norm

    def clip_and_time_scalar_path(self) -> None:
        pack = vars(clip_grad)["_pack"]  # the step that follows the partial norms
        waited_s = start = 0.0

        def pack_after_hook(*args: Any) -> Any:
            nonlocal waited_s, start
            called = time.perf_counter()
            self.before_scalar_path()
            start = time.perf_counter()
            waited_s = start - called
            return pack(*args)

        with mock.patch.object(clip_grad, "_pack", pack_after_hook):
            timings = self._clip().timings
        path_s = sum(timings[step] for step in ("pack", "reduce", "finish")) - waited_s
        self.scalar_path = start, start + path_s

    def _clip(self) -> hyper_parallel.ClipResult:
        return self._reducer.clip_(self.case.parameters, self.case.max_norm)


class HyperParallelOptimizer(Adapter):
    """The coefficient is left to the optimizer's step, so that the clip does not scale."""

    name = "hyper_parallel+optimizer"
    is_peer = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._clip = ClipForOptimizer(case.parameters, case.max_norm)

    def clip(self) -> torch.Tensor:
        return self._clip()

    def finish(self) -> None:
        self._clip.step()


class ClipForOptimizer:
    """`clip_grad_norm_(optimizer=)`, and the step that scales; its learning rate is 0."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
        self._parameters = parameters
        self._max_norm = max_norm
        self._optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)

    def __call__(self) -> torch.Tensor:
        return hyper_parallel.clip_grad_norm_(
            self._parameters, self._max_norm, optimizer=self._optimizer
        )

    def step(self) -> None:
        """Take the optimizer's step."""
        self._optimizer.step()
