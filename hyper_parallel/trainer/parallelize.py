"""Spread a Transformer over ranks: tensor parallel, expert parallel, then FSDP2.

Axes. Dense parameters live on (fsdp, tp), experts on (efsdp, ep); each pair covers all ranks.
Ranks along `fsdp` have data of their own, ranks along `tp` share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.dispatch import ExpertParallelDispatch
from hyper_parallel.trainer.model import Block, Experts, Transformer

__all__ = ["Meshes", "build_meshes", "parallelize"]


@dataclass(frozen=True)
class Meshes:
    """The four axes, 1-D each."""

    fsdp: DeviceMesh
    tp: DeviceMesh
    efsdp: DeviceMesh
    ep: DeviceMesh


def build_meshes(config: Config) -> Meshes:
    """Create the axes' groups. Ranks: all, in the same order."""
    tp_size, ep_size = config.accelerator.tp_size, config.accelerator.ep_size
    dense = init_device_mesh(
        config.device_type,
        (config.num_ranks // tp_size, tp_size),
        mesh_dim_names=("fsdp", "tp"),
    )
    experts = init_device_mesh(
        config.device_type,
        (config.num_ranks // ep_size, ep_size),
        mesh_dim_names=("efsdp", "ep"),
    )
    return Meshes(dense["fsdp"], dense["tp"], experts["efsdp"], experts["ep"])


def parallelize(model: Transformer, meshes: Meshes, *, offload: bool) -> None:
    """Shard the model in place. Ranks: all, with equal weights (same seed), in the same order.

    Args:
        model: On the host.
        meshes: From build_meshes.
        offload: Keep parameter, gradient and optimizer shards on the host (FSDP2 CPU offload).
    """
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        assert isinstance(block, Block)  # noqa: S101 - ModuleList forgets what it holds
        if meshes.tp.size() > 1:
            _shard_over_tp(block, meshes.tp)
        block.moe.dispatch = ExpertParallelDispatch(meshes.ep, meshes.tp)
        _shard_experts(block.moe.experts, meshes, policy)
        fully_shard(block, mesh=meshes.fsdp, offload_policy=policy)
    fully_shard(model, mesh=meshes.fsdp, offload_policy=policy)


def _shard_over_tp(block: Block, tp_mesh: DeviceMesh) -> None:
    """Split heads and MLP columns; norms and router stay whole on every `tp` rank."""
    attention: dict[str, ParallelStyle] = {
        "query": ColwiseParallel(),
        "key": ColwiseParallel(),
        "value": ColwiseParallel(),
        "out": RowwiseParallel(),
    }
    mlp: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block.attention, tp_mesh, attention, src_data_rank=None)
    parallelize_module(block.mlp, tp_mesh, mlp, src_data_rank=None)


def _shard_experts(experts: Experts, meshes: Meshes, policy: OffloadPolicy) -> None:
    """Give each `ep` rank its experts, then shard those over `efsdp`."""
    for name, parameter in list(experts.named_parameters()):
        # Equal weights everywhere, so that each rank can cut out its own part.
        local = distribute_tensor(parameter.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(local))
    fully_shard(experts, mesh=meshes.efsdp, offload_policy=policy)
    # An expert sees the rows of every batch, not only of its efsdp peers: FSDP2's average over
    # efsdp alone would leave gradients num_batches / efsdp_size too large. Not FSDP2's own divide
    # factor: gloo cannot take it in torch 2.9, and on one rank torch 2.13 divides by it twice.
    experts.gradient_factor = meshes.efsdp.size() / meshes.fsdp.size()
