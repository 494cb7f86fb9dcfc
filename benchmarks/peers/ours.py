"""This repository's clip, with what it has of ways to do without host passes."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import hyper_parallel
from hyper_parallel.platform.torch import clip_grad

from .adapter import Adapter, NotInThisVersionError

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["HyperParallel", "HyperParallelEarlyNorm", "HyperParallelOptimizer"]


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
        reduce_lanes = vars(clip_grad)["reduce_lanes"]
        waited_s = 0.0

        def reduce_after_hook(*args: Any) -> Any:
            nonlocal waited_s
            start = time.perf_counter()
            self.before_scalar_path()
            waited_s = time.perf_counter() - start
            return reduce_lanes(*args)

        with mock.patch.object(clip_grad, "reduce_lanes", reduce_after_hook):
            timings = self._clip().timings
        self.scalar_path_s = sum(timings[step] for step in ("pack", "reduce", "finish")) - waited_s

    def _clip(self) -> hyper_parallel.ClipResult:
        return self._reducer.clip_(self.case.parameters, self.case.max_norm)


class HyperParallelOptimizer(Adapter):
    """The coefficient is left to the optimizer's step, so that the clip does not scale."""

    name = "hyper_parallel+optimizer"
    is_peer = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if "optimizer" not in inspect.signature(hyper_parallel.clip_grad_norm_).parameters:
            raise NotInThisVersionError("not in this version: clip_grad_norm_(optimizer=)")
        self._optimizer = torch.optim.AdamW(case.parameters, lr=0.0, fused=True)

    def clip(self) -> torch.Tensor:
        options: dict[str, Any] = {"optimizer": self._optimizer}
        parameters, max_norm = self.case.parameters, self.case.max_norm
        return hyper_parallel.clip_grad_norm_(parameters, max_norm, **options)

    def finish(self) -> None:
        self._optimizer.step()


class HyperParallelEarlyNorm(Adapter):
    """Norms are taken on the device before the offload, so that the clip does not measure."""

    name = "hyper_parallel+early norm"
    is_peer = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if not hasattr(hyper_parallel, "NormBeforeOffload"):
            raise NotInThisVersionError("not in this version: NormBeforeOffload")
        raise NotInThisVersionError("to be done")
