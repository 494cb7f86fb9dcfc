"""What we use of FSDP2 beyond its public methods: with `torch_private` the only such place.

Imported as soon as a model is attached, not before: clips need none of it.

Read in torch 2.13 (`torch/distributed/fsdp/_fully_shard`), where a module may have several groups
of parameters, and in 2.9, where it has one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.autograd import Variable
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FsdpGroup", "FsdpParameter", "call_after_backward", "fsdp_groups"]

Hook = Callable[[torch.Tensor], None]


class _Private(NamedTuple):
    """Private names of FSDP2."""

    get_divide_factors: Callable[..., Any]
    shards: type
    replicates: type

    @classmethod
    @functools.cache
    def imported(cls) -> _Private:
        """Import them.

        Raises:
            RuntimeError: If this torch has other ones.
        """
        try:
            from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common

            return cls(
                _fsdp_collectives._get_gradient_divide_factors,  # noqa: SLF001
                _fsdp_common.FSDPMeshInfo,
                _fsdp_common.DDPMeshInfo,
            )
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"NormBeforeOffload does not know the FSDP2 of torch {torch.__version__} "
                f"({error}); leave it out, and clips read the gradients in host memory"
            ) from error


class FsdpParameter:
    """One parameter of a group.

    Attributes:
        padded_numel: Elements that it takes in the group's buffer on each rank.
        numel: Those of them, from the first, that are elements of this rank's shard.
    """

    def __init__(self, fsdp_param: Any) -> None:
        self._fsdp_param = fsdp_param
        self.padded_numel: int = fsdp_param.padded_sharded_param_size.numel()
        self.numel: int = fsdp_param.sharded_size.numel()

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The sharded parameter, whose `grad` is this rank's shard."""
        return cast("torch.nn.Parameter", self._fsdp_param.sharded_param)

    @property
    def has_grad_hooks(self) -> bool:
        """Whether hooks run as soon as the gradient is there, which may change it."""
        return bool(getattr(self.parameter, "_post_accumulate_grad_hooks", None))


class FsdpGroup:
    """The parameters of one FSDP2 module whose gradients are reduced in one buffer.

    Attributes:
        name: Of the module, for messages.
    """

    def __init__(self, name: str, module: FSDPModule, group: Any) -> None:
        self.name = name
        self._module = module
        self._group = group
        self._private = _Private.imported()

    @functools.cached_property
    def parameters(self) -> list[FsdpParameter]:
        """In the order of the buffer."""
        return [FsdpParameter(fsdp_param) for fsdp_param in self._group.fsdp_params]

    @property
    def device(self) -> torch.device:
        """Where the buffer is."""
        return cast("torch.device", self._group.device)

    @property
    def fault(self) -> str | None:
        """Why a hook would be of no use, if so."""
        if not isinstance(self._group.offload_policy, CPUOffloadPolicy):
            return "its gradients stay on the device"
        if self.device.type == "cpu":
            return "it trains on the CPU"
        return None

    @property
    def hook(self) -> Hook | None:
        """The all-reduce hook that is set."""
        return cast("Hook | None", self._group._all_reduce_hook)  # noqa: SLF001

    @hook.setter
    def hook(self, hook: Hook | None) -> None:
        # Its stub does not say so, but None is what it is before.
        self._module.set_all_reduce_hook(cast("Hook", hook))

    def gradients_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return what FSDP2 will make of the buffer that it shows the hook, element by element.

        Divided in place and then cast, both only where it is to be (`foreach_reduce`).
        """
        group = self._group
        mesh, private = group.mesh_info, self._private
        shards, replicates = isinstance(mesh, private.shards), isinstance(mesh, private.replicates)
        factors = private.get_divide_factors(
            group._reduce_scatter_process_group if shards else None,  # noqa: SLF001
            group._all_reduce_process_group if replicates else None,  # noqa: SLF001
            buffer.dtype,
            group.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        divisor = factors[1]
        divided = buffer if divisor is None or divisor == 1 else buffer / divisor
        return divided.to(group._orig_dtype or divided.dtype)  # noqa: SLF001


def fsdp_groups(model: torch.nn.Module) -> Iterator[tuple[FsdpGroup | None, str]]:
    """Yield the groups of a model with their modules' names; None where a module has several.

    `set_all_reduce_hook` refuses those.
    """
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()  # noqa: SLF001
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.9
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []  # noqa: SLF001
        if len(groups) == 1:
            yield FsdpGroup(name, module, groups[0]), name
        elif groups:
            yield None, name


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that is under way, as FSDP2 itself does.

    Raises:
        RuntimeError: If none is.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
