"""Parameters as they were passed: their gradients, and the names that errors use."""

from __future__ import annotations

import types
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from .lanes import stable_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["ParameterList"]


class ParameterList:
    """Parameters as they were passed, with the names that errors use.

    Args:
        parameters: A module, whose parameters have names, a tensor, or an iterable of tensors.
        names: Name by `id` of a parameter, for those of a module given earlier.
        are_gradients: The tensors are gradients themselves, as for `get_total_norm`.

    Attributes:
        tensors: What was listed, tensors or not.
        names: As passed, or the module's.
        are_gradients: As passed.
        failure: What the iterable raised on the way; it is raised where all ranks learn of it.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
        names: Mapping[int, str] = MappingProxyType({}),
        *,
        are_gradients: bool = False,
    ) -> None:
        self.names = names
        if isinstance(parameters, torch.nn.Module):
            named = dict(parameters.named_parameters())
            self.names = {id(parameter): name for name, parameter in named.items()}
            parameters = named.values()
        elif isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        self.are_gradients = are_gradients
        self.tensors: list[object] = []
        self.failure: Exception | None = None
        try:
            self.tensors.extend(parameters)
        except Exception as error:
            self.failure = error
        if isinstance(parameters, types.GeneratorType) and not (self.tensors or self.failure):
            warnings.warn(
                "the generator of parameters is empty or used up: nothing is clipped", stacklevel=3
            )

    def grad_of(self, parameter: object) -> object | None:
        """Return the gradient of a listed parameter, `main_grad` before `grad`."""
        if self.are_gradients:
            return parameter
        main_grad = getattr(parameter, "main_grad", None)
        return main_grad if main_grad is not None else getattr(parameter, "grad", None)

    def describe(self, position: int) -> str:
        """Name a parameter as an error should: by its name, else by index and shape."""
        tensor = self.tensors[position]
        if not isinstance(tensor, torch.Tensor):
            return f"parameters[{position}]"
        unnamed = f"parameters[{position}] of shape {tuple(tensor.shape)}"
        return self.names.get(id(tensor), unnamed)

    def has_dtensor(self) -> bool:
        """Tell whether a parameter, or its gradient, is a DTensor."""
        return any(isinstance(tensor, DTensor) for tensor in self.tensors) or any(
            isinstance(self.grad_of(tensor), DTensor) for tensor in self.tensors
        )

    def keys_of(self, position: int) -> tuple[int, int]:
        """Return `key` and `list_key` of a `PendingSum`."""
        name = self.names.get(id(self.tensors[position]))
        if name is not None:
            return stable_hash(name), 0
        shapes = [tuple(getattr(tensor, "shape", ())) for tensor in self.tensors]
        return stable_hash(str(position)), stable_hash(repr(shapes))
