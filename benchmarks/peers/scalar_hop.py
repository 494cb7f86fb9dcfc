"""One blocking hop to the device and back per bucket and mesh dim.

The repair that hyper-parallel PR #1385 describes, written from its description: torch's norm of
each bucket of like-placed gradients on the host, its power sum to the device, an all-reduce over
each mesh dim that shards the bucket, and back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .adapter import Adapter

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["ScalarHop"]


class ScalarHop(Adapter):
    """See above; buckets are made once, at set-up."""

    name = "scalar_hop"
    is_peer = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        buckets: dict[object, list[torch.Tensor]] = {}
        self._groups: dict[object, list[dist.ProcessGroup]] = {}
        for spec, grad in zip(case.layout.parameters, case.local_grads, strict=True):
            key = (spec.mesh, spec.placements)
            buckets.setdefault(key, []).append(grad)
            if spec.mesh is not None and key not in self._groups:
                self._groups[key] = _sharding_groups(case.meshes[spec.mesh], spec.placements)
        self._buckets = buckets

    def clip(self) -> torch.Tensor:
        norms = {key: torch.nn.utils.get_total_norm(grads) for key, grads in self._buckets.items()}
        self.before_scalar_path()
        start = time.perf_counter()
        power_sum = torch.zeros(())
        for key, norm in norms.items():
            bucket_sum = norm.square()
            for group in self._groups.get(key, ()):
                bucket_sum = self._hop(bucket_sum, group)
            power_sum += bucket_sum
        total_norm = power_sum.sqrt()
        self.scalar_path = start, time.perf_counter()
        grads = self.case.local_grads
        coef = self.case.max_norm / (total_norm + 1e-6)
        torch._foreach_mul_(grads, coef.clamp(max=1.0))
        return total_norm

    def _hop(self, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        on_device = value.to(self.case.device_type)
        dist.all_reduce(on_device, group=group)
        return on_device.cpu()


def _sharding_groups(mesh: DeviceMesh, placements: tuple[object, ...]) -> list[dist.ProcessGroup]:
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if isinstance(placement, Shard) and mesh.size(dim) > 1
    ]
