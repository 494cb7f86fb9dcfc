"""Parameters with given gradients on given meshes, host shards on accelerator meshes included."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

both = pytest.mark.parametrize("backend", ["gloo", pytest.param("hccl", marks=pytest.mark.simnpu)])
"""Run a test on a group that reduces CPU tensors and on one that does not."""


def device_of(backend: str) -> str:
    return "npu" if "hccl" in backend else "cpu"


def mesh_of(backend: str, shape: tuple[int, ...], names: tuple[str, ...] = ()) -> DeviceMesh:
    return init_device_mesh(device_of(backend), shape, mesh_dim_names=names or None)


def groupless_mesh(device_type: str, shape: Sequence[int], ranks: Sequence[int]) -> DeviceMesh:
    """Return a mesh of these ranks, row-major, without process groups of its own.

    Its DTensors can be clipped, which asks their mesh for ranks only; nothing else that talks works
    on them. Making groups takes all ranks of the world, and at 128 ranks minutes.
    """
    return DeviceMesh(device_type, torch.tensor(ranks).reshape(*shape), _init_backend=False)


def dtensor_of_shard(
    shard: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Return a DTensor of this full shape from this rank's shard, wherever the shard is."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, shard.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)


def host_dtensor(
    full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, on_host: bool = True
) -> DTensor:
    """Distribute a tensor and keep the shards on the host, as FSDP2's CPU offload does."""
    distributed = distribute_tensor(
        full.to(mesh.device_type), mesh, list(placements), src_data_rank=None
    )
    return on_the_host(distributed) if on_host else distributed


def on_the_host(dtensor: DTensor) -> DTensor:
    """Return a DTensor with the same spec and a host shard; only FSDP2 makes such otherwise."""
    return DTensor(dtensor._local_tensor.cpu(), dtensor._spec, requires_grad=False)


def parameter(
    grad: torch.Tensor | None,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
    *,
    shape: Sequence[int] | None = None,
    on_host: bool = True,
) -> torch.nn.Parameter:
    """Return a parameter of zeros with this full gradient; without one, `shape` says its shape."""
    shape = shape if grad is None else grad.shape
    dtype = torch.float32 if grad is None else grad.dtype
    zeros = torch.zeros(tuple(shape), dtype=dtype)
    if mesh is None:
        result = torch.nn.Parameter(zeros)
        result.grad = None if grad is None else grad.clone()
        return result
    result = torch.nn.Parameter(host_dtensor(zeros, mesh, placements, on_host=on_host))
    if grad is not None:
        result.grad = host_dtensor(grad.clone(), mesh, placements, on_host=on_host)
    return result


def parameter_of_shard(
    local_grad: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.nn.Parameter:
    """Return a parameter of zeros whose gradient's shard on this rank is `local_grad`."""
    pair = []
    for local in (torch.zeros_like(local_grad), local_grad.clone()):
        on_device = local.to(mesh.device_type)
        pair.append(
            on_the_host(DTensor.from_local(on_device, mesh, list(placements), run_check=False))
        )
    result = torch.nn.Parameter(pair[0])
    result.grad = pair[1]
    return result


def local_grad(param: torch.nn.Parameter) -> torch.Tensor:
    grad = param.grad
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def dense(backend: str, **options: bool) -> torch.nn.Parameter:
    """1..32 as 8x4, sharded over fsdp=4."""
    grad = torch.arange(1.0, 33.0).reshape(8, 4)
    return parameter(grad, mesh_of(backend, (4,), ("fsdp",)), [Shard(0)], **options)


def expert(backend: str, **options: bool) -> torch.nn.Parameter:
    """3 * (1..64) as 4x4x4 on (ep=2, efsdp=2)."""
    grad = 3 * torch.arange(1.0, 65.0).reshape(4, 4, 4)
    mesh = mesh_of(backend, (2, 2), ("ep", "efsdp"))
    return parameter(grad, mesh, [Shard(0), Shard(1)], **options)


__all__ = [
    "Replicate",
    "Shard",
    "both",
    "dense",
    "device_of",
    "dtensor_of_shard",
    "expert",
    "groupless_mesh",
    "host_dtensor",
    "local_grad",
    "mesh_of",
    "parameter",
    "parameter_of_shard",
]
