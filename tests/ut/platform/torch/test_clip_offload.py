"""Host shards under accelerator-only groups, from public bug reports; on the simulated NPU.

Each test names its report.
"""

import math

import pytest
import torch
from torch.distributed.tensor import Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from tests.ranks import run_ranks
from tests.sharding import (
    local_grad,
    mesh_of,
    parameter,
)


@pytest.mark.simnpu
@pytest.mark.parametrize(("p", "norm"), [(2.0, 4.0), (1.0, 16.0), (math.inf, 1.0)])
def test_host_shards_on_an_accelerator_only_group(p, norm):
    """hyper-parallel#612, pytorch#148532, torchtune#1977, axolotl#3058: crashed.

    A CPU tensor that reached the hccl group would raise, as torch's own clip shows here.
    """

    def rank_main(rank):
        mesh = mesh_of("hccl", (2,))
        param = parameter(torch.ones(8, 2), mesh, [Shard(0)])
        with pytest.raises(RuntimeError) as raised:
            torch.nn.utils.clip_grad_norm_([param], 1.0)
        assert str(raised.value) == "No backend type associated with device type cpu"
        total = clip_grad_norm_([param], 1.0, p).item()
        return total, get_total_norm([param.grad], p).item()

    results = run_ranks(rank_main, 2, backend="hccl")
    assert [total for total, _ in results] == [norm, norm]
    assert [after for _, after in results] == pytest.approx([1.0, 1.0], abs=2e-6)


@pytest.mark.simnpu
def test_ten_and_a_thousand_parameters_cost_the_same():
    """pytorch#60691: 1 copy up, 1 all-reduce, 1 copy down, 1 host sync."""
    from hyper_parallel.testing import simnpu

    def rank_main(rank):
        mesh = mesh_of("hccl", (2,))
        params = [parameter(torch.ones(2), mesh, [Shard(0)]) for _ in range(1000)]
        clip_grad_norm_(params, math.inf)
        costs = []
        for n in (10, 1000):
            simnpu.reset_counters()
            norm = clip_grad_norm_(params[:n], 1.0)
            counters = simnpu.counters()
            assert counters["early_rewrites"] == 0
            costs.append([counters[k] for k in ("h2d", "collectives", "d2h", "host_syncs")])
            assert norm.item() == pytest.approx(math.sqrt(2 * n))
            for param in params:
                local_grad(param).fill_(1.0)
        return costs

    assert run_ranks(rank_main, 2, backend="hccl") == [[[1, 1, 1, 1]] * 2] * 2


@pytest.mark.simnpu
def test_result_is_not_read_before_its_copy_completed():
    """torchrec#4421. Copies on the simulated NPU do nothing until somebody waits for them."""

    def rank_main(rank):
        norms = []
        for value in (1.0, 2.0, 3.0):
            param = parameter(torch.full((4,), value), mesh_of("hccl", (2,)), [Shard(0)])
            norms.append(clip_grad_norm_([param], 1.0).item())
        return norms

    assert run_ranks(rank_main, 2, backend="hccl") == [[2.0, 4.0, 6.0]] * 2


@pytest.mark.simnpu
def test_offload_on_and_off_step_to_equal_parameters():
    """ms-swift#9844, Megatron-LM (lite)#21, with FSDP2's own offload."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    def train(rank, policy):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5)
        )
        mesh = mesh_of("hccl", (4,))
        if not isinstance(policy, CPUOffloadPolicy):
            model.to("npu")
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        norms = []
        for step in range(3):
            torch.manual_seed(step * 10 + rank)
            model(torch.randn(4, 13).to("npu")).square().sum().backward()
            result = NormReducer(model).clip_(model.parameters(), 0.1)
            assert result.clip_coef < 1.0
            norms.append(result.total_norm.item())
            optimizer.step()
            optimizer.zero_grad()
        return norms, [p.to_local().detach().cpu() for p in model.parameters()]

    def rank_main(rank):
        resident, offloaded = (
            train(rank, policy) for policy in (OffloadPolicy(), CPUOffloadPolicy())
        )
        assert resident[0] == offloaded[0]
        for a, b in zip(resident[1], offloaded[1], strict=True):
            assert torch.equal(a, b)
        return offloaded[0]

    results = run_ranks(rank_main, 4, backend="hccl", timeout_s=50)
    assert all(norms == results[0] for norms in results)
