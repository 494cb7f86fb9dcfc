"""torch's own clip, and FSDP1's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from .adapter import Adapter

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["Fsdp1", "Torch"]


class Torch(Adapter):
    """`torch.nn.utils.clip_grad_norm_`."""

    name = "torch"

    def clip(self) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.case.parameters, self.case.max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Fsdp1(Adapter):
    """FSDP1's own `clip_grad_norm_`, over one flat parameter with the case's gradients."""

    name = "fsdp1"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        meshes = list(case.meshes.values())
        replicates = case.layout.name.startswith("hsdp")
        module = case.module
        strategy = ShardingStrategy.FULL_SHARD
        if len(meshes) == 1:
            # One plain parameter as large as all shards together: FSDP1 makes its flat parameter
            # of it, of which each rank's share has the elements of its gradients.
            module = torch.nn.Module()
            numel = sum(grad.numel() for grad in case.local_grads) * meshes[0].size(-1)
            module.flat = torch.nn.Parameter(torch.zeros(numel))
            strategy = ShardingStrategy.HYBRID_SHARD if replicates else strategy
        self._model = FullyShardedDataParallel(
            module,
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=True),
            device_mesh=meshes[0],
            device_id=torch.accelerator.current_device_index(),
        )
        self._grad = torch.empty(sum(grad.numel() for grad in case.local_grads))
        (flat,) = self._model.parameters()
        flat.grad = self._grad.view_as(flat)

    def clip(self) -> torch.Tensor:
        return self._model.clip_grad_norm_(self.case.max_norm)

    def restore(self) -> None:
        super().restore()
        torch.cat([grad.view(-1) for grad in self.case.local_grads], out=self._grad)

    @property
    def local_grads(self) -> Sequence[torch.Tensor]:
        sizes = [grad.numel() for grad in self.case.local_grads]
        return torch.split(self._grad, sizes)
