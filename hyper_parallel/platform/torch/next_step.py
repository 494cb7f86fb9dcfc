"""What a clip has left for the next step of an optimizer: a coefficient, or that it be skipped.

Both are lent to `grad_scale` and `found_inf` for the time of that step: the attributes by which
`torch.amp.GradScaler` drives fused optimizers.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .early_norms import outdate
from .failure import join_some
from .torch_private import is_stepping, local_tensors, not_compiled, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "NextStep",
    "forget",
    "names_of",
    "next_step_of",
    "pending_steps",
    "reciprocal",
    "with_gradients",
]

T = TypeVar("T")

_MISSING = object()


class NextStep:
    """What the next step of one optimizer is to do beside its work.

    It is for the gradients that were clipped, which the step finds again by identity, and unwritten
    as far as torch counts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._coef = 1.0
        self._skip = False
        self._clipped: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, ...]]] = {}
        # Of each attribute that is lent: our tensor, and what was there before.
        self._lent: dict[str, tuple[torch.Tensor, Any]] = {}
        # Of a step that is to be skipped: which state each parameter had.
        self._states: dict[torch.Tensor, set[str]] = {}
        self._has_pre_hook = False
        optimizer.register_step_post_hook(self._after_step)

    @property
    def is_pending(self) -> bool:
        """Whether the step is to do anything."""
        return self._skip or reciprocal(self._coef) != 1.0

    def is_for(self, grad: object) -> bool:
        """Tell whether this gradient is among those that were clipped."""
        clipped = self._clipped.get(id(grad))
        return clipped is not None and clipped[0]() is grad

    def replace(self, optimizer: torch.optim.Optimizer, coef: float, *, skip: bool) -> None:
        """Let the next step, or the one that has called for this clip, do this instead."""
        self._coef, self._skip = coef, skip
        self._clipped = {}
        if self.is_pending:
            self._clipped = {
                id(grad): (weakref.ref(grad), _versions_of(grad))
                for grad in _gradients_of(optimizer)
            }
        self._give_back(optimizer)  # of a step that raised, or that is under way
        if is_stepping(optimizer):  # called by its closure, or by another pre-hook
            self._lend(optimizer)
        else:
            self._register_pre_hook(optimizer)

    def _register_pre_hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Not while pre-hooks are run: that would end them, or not be noticed."""
        if not self._has_pre_hook:
            optimizer.register_step_pre_hook(self._before_step)
            self._has_pre_hook = True

    @not_compiled
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._give_back(optimizer)  # of a step that raised
        if not self.is_pending:
            self._lend(optimizer)  # a GradScaler's, if there is one
            return None
        self._validate(optimizer)
        self._lend(optimizer)
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._checked(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._checked(optimizer, args[1]), *args[2:]), kwargs
        return None

    def _checked(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], T]
    ) -> Callable[[], T]:
        """Let a closure that makes other gradients clip these too."""

        def checked() -> T:
            loss = closure()
            if self.is_pending:
                self._validate(optimizer)
            return loss

        return checked

    def _validate(self, optimizer: torch.optim.Optimizer) -> None:
        others = [p for p, grad in with_gradients(optimizer) if not self._is_as_clipped(grad)]
        if others:
            self._give_back(optimizer)
            raise RuntimeError(
                "this step is to scale the gradients that were clipped with optimizer=, but there "
                "are others, or they were written since: "
                f"{join_some(names_of(optimizer, others))}. Clip these too, "
                "with max_norm=math.inf if they are to stay as they are, and replace or write none "
                "between clip and step"
            )

    def _is_as_clipped(self, grad: torch.Tensor) -> bool:
        return self.is_for(grad) and self._clipped[id(grad)][1] == _versions_of(grad)

    @not_compiled
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._give_back(optimizer)
        for parameter, known in self._states.items():
            self._forget_states(optimizer, parameter, known)
        self._states = {}
        self._coef, self._skip = 1.0, False
        self._clipped = {}
        self._register_pre_hook(optimizer)

    def _forget_states(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, known: set[str]
    ) -> None:
        """Undo what a skipped step has begun: fused SGD keeps momentum that it never wrote."""
        state = optimizer.state.get(parameter, {})
        for name in set(state) - known:
            del state[name]
        if not state:
            optimizer.state.pop(parameter, None)

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        device = _device_of(optimizer)
        scale = _present(optimizer, "grad_scale", device)
        found_inf = _present(optimizer, "found_inf", device)
        divisor = reciprocal(self._coef)
        if divisor is not None and divisor != 1.0:
            ours = torch.full((), divisor, dtype=torch.float32, device=device)
            scale = ours if scale is None else scale * ours
        self._states = {}
        if self._skip:
            found_inf = torch.ones((), dtype=torch.float32, device=device)
            self._states = {
                p: {name for name, value in optimizer.state.get(p, {}).items() if value is not None}
                for p, _ in with_gradients(optimizer)
            }
        if scale is not None:
            _outdate_early_norms(optimizer)
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


_next_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, NextStep] = (
    weakref.WeakKeyDictionary()
)


def next_step_of(optimizer: torch.optim.Optimizer) -> NextStep:
    """Return the next step of an optimizer; the first time it gets hooks for it."""
    if optimizer not in _next_steps:
        _next_steps[optimizer] = NextStep(optimizer)
    return _next_steps[optimizer]


def forget(optimizer: object) -> None:
    """Drop what was left for the next step of this optimizer, if it is one and anything was."""
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer in _next_steps:
        _next_steps[optimizer].replace(optimizer, 1.0, skip=False)


def pending_steps() -> list[tuple[torch.optim.Optimizer, NextStep]]:
    """Return optimizers whose next step has something to do, with what that is."""
    return [(optimizer, step) for optimizer, step in _next_steps.items() if step.is_pending]


def reciprocal(coef: float) -> float | None:
    """Return the float32 that a step has to divide by; None if 1 / coef is beyond them.

    0 gives inf, and NaN itself: gradients become 0, and NaN, as they do if multiplied.
    """
    if coef == 0.0:
        return math.inf
    divisor = torch.tensor(1.0 / coef, dtype=torch.float32, device="cpu").item()
    return None if math.isinf(divisor) else divisor


def with_gradients(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters that a step would change, each with its gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                yield parameter, grad


def names_of(optimizer: torch.optim.Optimizer, chosen: Iterable[torch.Tensor]) -> list[str]:
    """Return what errors call parameters of an optimizer."""
    named: dict[int, str] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for i, parameter in enumerate(group["params"]):
            unnamed = f"param_groups[{group_index}]['params'][{i}]"
            named[id(parameter)] = names[i] if i < len(names) else unnamed
    return [f"{named[id(p)]} of shape {tuple(p.shape)}" for p in chosen]


def _versions_of(grad: torch.Tensor) -> tuple[int, ...]:
    return versions_of(grad, *local_tensors([grad]))


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [grad for _, grad in with_gradients(optimizer)]


def _outdate_early_norms(optimizer: torch.optim.Optimizer) -> None:
    """Fused steps write to gradients, of which no version counter knows where they are DTensors."""
    locals_ = local_tensors(_gradients_of(optimizer))
    outdate(locals_, "was scaled by an optimizer's step")


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
