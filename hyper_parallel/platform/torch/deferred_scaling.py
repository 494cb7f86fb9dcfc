"""Where the clip coefficient goes: into the gradients, or into the optimizer's next step.

Fused optimizers read every gradient anyway and divide it by `grad_scale` on the way, which is what
`torch.amp.GradScaler` sets, and do nothing at all where `found_inf` is 1. A coefficient given to
`optimizer=` is kept here, and lent to those two attributes for the time of one step, so that no
pass over memory is spent on the clip.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .clip_result import Copies
from .early_norms import outdate
from .failure import join_some
from .partial_norms import scale_
from .torch_private import takes_grad_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .grad_shards import GradShards
    from .parameter_list import ParameterList

__all__ = ["Scaling"]

_MISSING = object()
_WIDE = frozenset((torch.float64, torch.complex128))


@dataclass(frozen=True)
class Scaling:
    """What a clip does with its coefficient.

    Attributes:
        foreach: Whether gradients are scaled by multi-tensor kernels, not one by one.
        optimizer: Whose next step is to scale the gradients instead; None to scale them here.
    """

    foreach: bool
    optimizer: torch.optim.Optimizer | None = None

    def forget(self) -> None:
        """Drop what an earlier clip left for the optimizer's next step: every clip replaces it."""
        if self.optimizer is not None and self.optimizer in _next_steps:
            _next_step(self.optimizer).replace(1.0, skip=False)

    def validate(
        self, listed: ParameterList, shards: GradShards, *, skip_nonfinite: bool = False
    ) -> None:
        """Check that the optimizer's step scales what is clipped, all of it and nothing else.

        Raises:
            ValueError: Naming the gradients of which only one of the two knows; if a step is to be
                skipped, but no optimizer was given.
            TypeError: If the optimizer is none, or cannot scale in its step; if a gradient is not
                the one that it reads, or is float64.
        """
        if self.optimizer is None:
            if skip_nonfinite:
                raise ValueError("skip_nonfinite=True needs optimizer=, whose step is skipped")
            return
        if not takes_grad_scale(self.optimizer):
            raise TypeError(
                f"optimizer= is a {type(self.optimizer).__name__} that cannot scale gradients in "
                "its step; construct it with fused=True (AdamW, Adam; SGD for parameters that are "
                "no DTensors), or clip without optimizer="
            )
        clipped = {id(listed.tensors[i]): i for i in shards.positions}
        stepped = dict(_parameters_with_grad(self.optimizer))
        missing = [listed.describe(i) for key, i in clipped.items() if key not in stepped]
        extra = [
            listed.names.get(key, where) for key, where in stepped.items() if key not in clipped
        ]
        if missing or extra:
            parts = [f"clipped but not in the optimizer: {join_some(missing)}"] if missing else []
            parts += [f"in the optimizer but not clipped: {join_some(extra)}"] if extra else []
            raise ValueError(
                "optimizer= must hold the clipped parameters that have gradients and no others, "
                f"since its step scales all it holds; {'; '.join(parts)}. Pass the same "
                "parameters, or clip without optimizer="
            )
        others = [
            listed.describe(i)
            for i in shards.positions
            if listed.grad_of(listed.tensors[i]) is not getattr(listed.tensors[i], "grad", None)
        ]
        if others:
            raise TypeError(
                f"optimizer= reads .grad, but of {join_some(others)} main_grad is clipped; clip "
                "without optimizer="
            )
        if not _WIDE.isdisjoint(shards.dtypes):
            raise TypeError(
                "optimizer= scales in float32, but there are float64 gradients; clip without "
                "optimizer="
            )

    def apply(self, shards: GradShards, coef: float, *, skip_step: bool) -> tuple[int, Copies]:
        """Scale the gradients, or leave it to the optimizer's next step.

        Args:
            shards: What is clipped.
            coef: The coefficient, a float32 (float64) value.
            skip_step: Whether the optimizer's next step is to do nothing.

        Returns:
            Bytes of host memory that were read, and written; and what it cost.
        """
        if self.optimizer is not None and (skip_step or _reciprocal(coef) is not None):
            _next_step(self.optimizer).replace(coef, skip=skip_step)
            return 0, Copies()
        if coef == 1.0:
            return 0, Copies()
        outdate(shards.tensors, "was scaled by a clip")  # which no version counter knows
        copies = scale_(shards.tensors, coef, foreach=self.foreach, are_plain=shards.are_plain)
        return shards.host_bytes, copies


class _NextStep:
    """What the next step of one optimizer is to do beside its work."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._coef = 1.0
        self._skip = False
        # Of each attribute that is lent: our tensor, and what was there before.
        self._lent: dict[str, tuple[torch.Tensor, Any]] = {}
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def replace(self, coef: float, *, skip: bool) -> None:
        self._coef, self._skip = coef, skip
        stepping = self._stepping() if self._stepping is not None else None
        if stepping is not None:  # clipped by the closure that the step has called
            self._give_back(stepping)
            self._lend(stepping)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._give_back(optimizer)  # of a step that raised
        self._lend(optimizer)
        self._stepping = weakref.ref(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._give_back(optimizer)
        self._stepping = None
        self._coef, self._skip = 1.0, False

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        device = _device_of(optimizer)
        scale = _present(optimizer, "grad_scale", device)
        found_inf = _present(optimizer, "found_inf", device)
        reciprocal = _reciprocal(self._coef)
        if reciprocal is not None and reciprocal != 1.0:
            divisor = torch.full((), reciprocal, dtype=torch.float32, device=device)
            scale = divisor if scale is None else scale * divisor
        if self._skip:
            found_inf = torch.ones((), dtype=torch.float32, device=device)
        for name, tensor in (("grad_scale", scale), ("found_inf", found_inf)):
            before = getattr(optimizer, name, _MISSING)
            if tensor is not None and tensor is not before:
                self._lent[name] = (tensor, before)
                setattr(optimizer, name, tensor)

    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        for name, (ours, before) in self._lent.items():
            if getattr(optimizer, name, _MISSING) is not ours:
                continue  # replaced by somebody else meanwhile
            if before is _MISSING:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, before)
        self._lent.clear()


_next_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _NextStep] = (
    weakref.WeakKeyDictionary()
)


def _next_step(optimizer: torch.optim.Optimizer) -> _NextStep:
    if optimizer not in _next_steps:
        _next_steps[optimizer] = _NextStep(optimizer)
    return _next_steps[optimizer]


def _reciprocal(coef: float) -> float | None:
    """Return the float32 that a step has to divide by; None if 1 / coef is beyond them.

    0 gives inf, and NaN itself: gradients become 0, and NaN, as they do if multiplied.
    """
    if coef == 0.0:
        return math.inf
    reciprocal = torch.tensor(1.0 / coef, dtype=torch.float32).item()
    return None if math.isinf(reciprocal) else reciprocal


def _parameters_with_grad(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
    """Yield id and name of the parameters that a step would change."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for i, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                unnamed = f"param_groups[{group_index}]['params'][{i}]"
                named = names[i] if i < len(names) else unnamed
                yield id(parameter), f"{named} of shape {tuple(parameter.shape)}"


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of all its parameters, the CPU if they are on several."""
    devices = {
        parameter.device for group in optimizer.param_groups for parameter in group["params"]
    }
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _present(
    optimizer: torch.optim.Optimizer, name: str, device: torch.device
) -> torch.Tensor | None:
    """Return what a GradScaler has set, on the CPU if the parameters are there.

    Sync: one in that case, if it is not there yet. Left to itself torch 2.13 copies it down without
    waiting, and divides by what happens to be in that memory.
    """
    tensor: torch.Tensor | None = getattr(optimizer, name, None)
    return tensor.cpu() if tensor is not None and device.type == "cpu" else tensor
