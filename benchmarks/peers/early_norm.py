"""This repository's clip with norms that were taken on the device, before FSDP2's offload.

That needs a backward pass of FSDP2 for each clip, whose loss is made so that its gradients are the
case's to the bit: the gradients of one rank are the whole ones times the number of ranks, those of
the others zero, and that number is a power of two, so that no order of FSDP2's average rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import hyper_parallel

from .adapter import Adapter
from .ours import ClipForOptimizer

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["HyperParallelEarlyNorm", "HyperParallelNoHostPass"]

_FSDP_PLACEMENTS = ((Shard(0),), (Replicate(), Shard(0)))


class HyperParallelEarlyNorm(Adapter):
    """`NormBeforeOffload`: the clip does not measure."""

    name = "hyper_parallel+early norm"
    is_peer = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        others = {p.placements for p in case.layout.parameters} - set(_FSDP_PLACEMENTS)
        if others:
            raise NotImplementedError(
                "this benchmark makes backward passes for FSDP and HSDP meshes only"
            )
        self._models = []
        self.parameters: list[torch.nn.Parameter] = [torch.nn.Parameter()] * len(case.parameters)
        for name, mesh in case.meshes.items():
            places = [i for i, spec in enumerate(case.layout.parameters) if spec.mesh == name]
            addend = mesh.size() if not any(mesh.get_coordinate() or ()) else 0
            wholes = [_gather(case.local_grads[i], mesh) for i in places]
            model = _LinearLoss([whole.mul_(addend) for whole in wholes])
            policy = CPUOffloadPolicy(pin_memory=False)
            fully_shard(model, mesh=mesh, offload_policy=policy, reshard_after_forward=False)
            for i, parameter in zip(places, model.weights, strict=True):
                self.parameters[i] = parameter
            self._models.append(model)
        self._early = [hyper_parallel.NormBeforeOffload(model) for model in self._models]

    def clip(self) -> torch.Tensor:
        return hyper_parallel.clip_grad_norm_(self.parameters, self.case.max_norm)

    def restore(self) -> None:
        self.case.restore()
        for model in self._models:
            model.zero_grad()
            model().backward()
        for grad, original in zip(self.local_grads, self.case.local_grads, strict=True):
            if not torch.equal(grad, original):
                raise AssertionError("the backward pass made other gradients than the case's")

    @property
    def local_grads(self) -> Sequence[torch.Tensor]:
        grads = [parameter.grad for parameter in self.parameters]
        return [grad.to_local() for grad in grads if isinstance(grad, DTensor)]


class HyperParallelNoHostPass(HyperParallelEarlyNorm):
    """The clip neither measures nor scales."""

    name = "hyper_parallel+early norm+optimizer"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._clip = ClipForOptimizer(self.parameters, case.max_norm)

    def clip(self) -> torch.Tensor:
        return self._clip()

    def finish(self) -> None:
        self._clip.step()


class _LinearLoss(torch.nn.Module):
    """Weights whose gradients are given: the loss is their product, at weights of zero."""

    def __init__(self, grads: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._grads = grads
        self.weights = torch.nn.ParameterList(torch.zeros(grad.shape) for grad in grads)

    def forward(self) -> torch.Tensor:
        apply: Any = _Product.apply
        products = [apply(w, g) for w, g in zip(self.weights, self._grads, strict=True)]
        return torch.stack(products).sum()


class _Product(torch.autograd.Function):
    """The sum of weight times gradient for a weight of zero, which need not be read for that."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> tuple[torch.Tensor, None]:
        del one
        return ctx.grad, None


def _gather(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the shards of all ranks of the mesh's last dim, on the device."""
    group = mesh.get_group(mesh.ndim - 1)
    on_device = local.to(mesh.device_type)
    shards = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, on_device, group=group)
    return torch.cat(shards)
