"""Layouts over the life of a process: several models, subsets of the ranks, ranks renumbered."""

import datetime
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_
from hyper_parallel.platform.torch.clip_result import Copies
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import both, device_of, mesh_of, parameter


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@both
def test_two_models_with_different_meshes_take_turns(backend):
    """One over FSDP 4 and EP 2 x EFSDP 2, one over HSDP 2 x 2: one reduce a clip, once known."""

    def rank_main(rank):
        fsdp = mesh_of(backend, (4,), ("fsdp",))
        grid = mesh_of(backend, (2, 2), ("outer", "inner"))
        models = [
            [
                parameter(values(0, 8, 3), fsdp, [Shard(0)]),
                parameter(values(1, 4, 4), grid, [Shard(0), Shard(1)]),
                parameter(values(2, 6), grid, [Shard(0), Replicate()]),
            ],
            [
                parameter(values(3, 9), grid, [Replicate(), Shard(0)]),
                parameter(values(4, 3)),
            ],
        ]
        norms, costs = [], []
        for step in range(6):
            result = NormReducer().clip_(models[step % 2], math.inf)
            norms.append(result.total_norm)
            costs.append(result.copies)
            assert result.replica_spread == 0
        moves = 1 if backend == "hccl" else 0
        assert costs[2:] == [Copies(moves, 1, moves, moves)] * 4
        return norms

    sums = [
        exact_pow_sum([values(0, 8, 3), values(1, 4, 4), values(2, 6)]),
        exact_pow_sum([values(3, 9), values(4, 3)]),
    ]
    for norms in run_ranks(rank_main, 4, backend=backend):
        for step, norm in enumerate(norms):
            assert_rounds_sqrt(norm, sums[step % 2])


@both
def test_overlapping_rank_sets_in_a_subset_of_the_ranks(backend):
    """A chain {0,1}, {1,2}, {2,3} beside {0,1,2,3}; rank 4 does nothing at all."""

    def rank_main(rank):
        group = dist.new_group([0, 1, 2, 3])
        meshes = [DeviceMesh(device_of(backend), [i, i + 1]) for i in range(3)]
        whole = DeviceMesh(device_of(backend), [0, 1, 2, 3])
        if rank == 4:
            return None
        params = [parameter(values(9, 8), whole, [Shard(0)])]
        params += [
            parameter(values(i, 4), mesh, [Shard(0)])
            for i, mesh in enumerate(meshes)
            if rank in (i, i + 1)
        ]
        first = clip_grad_norm_(params, math.inf, group=group)
        reducer = NormReducer(torch.nn.ParameterList(params), group=group)
        result = reducer.clip_(params, math.inf)
        assert result.copies.collectives == 1
        assert first == result.total_norm
        return result.total_norm

    norms = run_ranks(rank_main, 5, backend=backend)
    assert norms.pop() is None
    for rank, norm in enumerate(norms):
        chain = [values(i, 4) for i in range(3) if rank in (i, i + 1)]
        assert_rounds_sqrt(norm, exact_pow_sum([values(9, 8), *chain]))


def test_ranks_are_renumbered_when_torch_distributed_is_started_anew(tmp_path):
    """torch hands out meshes from its own caches, which remember where the rank was before."""

    def rank_main(rank, folder):
        norms = []
        for life, number in enumerate([rank, 3 - rank, (rank + 1) % 4]):
            store = dist.FileStore(os.path.join(folder, f"store{life}"), 4)
            timeout = datetime.timedelta(seconds=10)
            dist.init_process_group("gloo", store=store, rank=number, world_size=4, timeout=timeout)
            mesh = mesh_of("gloo", (2, 2), ("replicate", "shard"))
            params = [
                parameter(values(life, 8), mesh, [Replicate(), Shard(0)]),
                parameter(values(life + 5, 8), mesh["shard"], [Shard(0)]),
                parameter(values(life + 9, 8), mesh, [Shard(0), Replicate()]),
            ]
            result = NormReducer().clip_(params, math.inf)
            mine = (0, 1) if number < 2 else (2, 3)
            across = (0, 2) if number % 2 == 0 else (1, 3)
            assert set(result.norms_by_rank_set) == {mine, across}
            norms.append(result.total_norm)
            dist.barrier()
            dist.destroy_process_group()
        return norms

    for norms in run_ranks(rank_main, 4, str(tmp_path), backend="none"):
        for life, norm in enumerate(norms):
            grads = [values(life, 8), values(life + 5, 8), values(life + 9, 8)]
            assert_rounds_sqrt(norm, exact_pow_sum(grads))
