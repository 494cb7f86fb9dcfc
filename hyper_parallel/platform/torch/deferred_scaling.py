"""Where the clip coefficient goes: into the gradients, or into the optimizer's next step.

Fused optimizers read every gradient anyway and divide it by `grad_scale` on the way, which is what
`torch.amp.GradScaler` sets, and do nothing at all where `found_inf` is 1. A coefficient given to
`optimizer=` is left to its next step (`next_step`), so that no pass over memory is spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from .clip_request import ClipRequest
from .clip_result import Copies
from .early_norms import outdate
from .failure import join_some
from .grad_shards import WIDE_DTYPES
from .next_step import (
    forget,
    names_of,
    next_step_of,
    pending_steps,
    reciprocal,
    with_gradients,
)
from .partial_norms import scale_
from .torch_private import takes_grad_scale

if TYPE_CHECKING:
    from .grad_shards import GradShards
    from .parameter_list import ParameterList

__all__ = ["Scaling"]

# Of `clip_grads_with_norm_`.
_SCALING_ASKED = ClipRequest(0.0, 2.0, error_if_nonfinite=False)


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
        """Drop what an earlier clip left for the optimizer's next step: every clip replaces it.

        Called first of all, so that nothing of it is left if the clip fails.
        """
        forget(self.optimizer)

    def validate(
        self, listed: ParameterList, shards: GradShards, request: ClipRequest = _SCALING_ASKED
    ) -> None:
        """Check that the optimizer's step scales what is clipped, all of it and nothing else.

        Raises:
            ValueError: Naming the gradients of which only one of the two knows, or those that the
                next step of another optimizer is to scale; if a step is to be skipped, but no
                optimizer was given.
            TypeError: If the optimizer is none, or cannot scale in its step; if a gradient is not
                the one that it reads, or is float64.
        """
        if request.changes_gradients:
            _validate_nothing_pends(listed, shards)
        if self.optimizer is None:
            if request.skip_nonfinite:
                raise ValueError("skip_nonfinite=True needs optimizer=, whose step is skipped")
            return
        if not takes_grad_scale(self.optimizer) or _is_sgd_of_dtensors(self.optimizer):
            raise TypeError(_why_not(self.optimizer))
        _validate_parameters(self.optimizer, listed, shards)
        if not WIDE_DTYPES.isdisjoint(shards.dtypes):
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
        if self.optimizer is not None and (skip_step or reciprocal(coef) is not None):
            next_step_of(self.optimizer).replace(self.optimizer, coef, skip=skip_step)
            return 0, Copies()
        if coef == 1.0:
            return 0, Copies()
        outdate(shards.tensors, "was scaled by a clip")  # which no version counter knows
        copies = scale_(shards.tensors, coef, foreach=self.foreach, are_plain=shards.are_plain)
        return shards.host_bytes, copies


def _is_sgd_of_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether torch (2.9 to 2.13) has no fused kernel for it: its step would raise."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        isinstance(parameter, DTensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _why_not(optimizer: object) -> str:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD) and _is_sgd_of_dtensors(optimizer):
        return (
            f"optimizer= is an {kind} that holds DTensors, for which torch has no fused step; use "
            "AdamW or Adam with fused=True, or clip without optimizer="
        )
    groups = getattr(optimizer, "param_groups", [])
    if groups and all(group.get("fused") for group in groups):
        return (
            f"optimizer= is a {kind} that was copied or unpickled, and has lost how to scale "
            "gradients in its step; construct it anew and load its state_dict, or clip without "
            "optimizer="
        )
    return (
        f"optimizer= is a {kind} that cannot scale gradients in its step; construct it with "
        "fused=True (AdamW, Adam; SGD for parameters that are no DTensors), or clip without "
        "optimizer="
    )


def _validate_nothing_pends(listed: ParameterList, shards: GradShards) -> None:
    """Check that no other step is to scale these gradients, or they would be scaled twice."""
    for optimizer, step in pending_steps():
        twice = [
            listed.describe(i)
            for i in shards.positions
            if step.is_for(listed.grad_of(listed.tensors[i]))
        ]
        if twice:
            raise ValueError(
                f"the next step of an {type(optimizer).__name__} is to scale {join_some(twice)}, "
                "which were clipped with optimizer= before; pass it here too, since the last clip "
                "counts, or step first"
            )


def _validate_parameters(
    optimizer: torch.optim.Optimizer, listed: ParameterList, shards: GradShards
) -> None:
    clipped = {id(listed.tensors[i]): i for i in shards.positions}
    stepped = {id(parameter): parameter for parameter, _ in with_gradients(optimizer)}
    if clipped.keys() != stepped.keys():
        missing = [listed.describe(i) for key, i in clipped.items() if key not in stepped]
        others = [parameter for key, parameter in stepped.items() if key not in clipped]
        named = zip(others, names_of(optimizer, others), strict=True)
        extra = [listed.names.get(id(parameter), name) for parameter, name in named]
        parts = [f"clipped but not in the optimizer: {join_some(missing)}"] if missing else []
        parts += [f"in the optimizer but not clipped: {join_some(extra)}"] if extra else []
        raise ValueError(
            "optimizer= must hold the clipped parameters that have gradients and no others, "
            f"since its step scales all it holds; {'; '.join(parts)}. Pass the same "
            "parameters, or clip without optimizer="
        )
    unread = [
        listed.describe(i)
        for i in shards.positions
        if listed.grad_of(listed.tensors[i]) is not getattr(listed.tensors[i], "grad", None)
    ]
    if unread:
        raise TypeError(
            f"optimizer= reads .grad, but of {join_some(unread)} main_grad is clipped; clip "
            "without optimizer="
        )
