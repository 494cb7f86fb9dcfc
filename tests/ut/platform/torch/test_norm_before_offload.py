"""Norms taken before the offload are those of the host pass, on every layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from hyper_parallel import NormBeforeOffload, NormReducer, clip_grad_norm_
from tests.early import ALL, Model, compare, exact, offloaded, train_once
from tests.ranks import HOST_AND_NPU, run_ranks
from tests.reference import assert_rounds_sqrt
from tests.sharding import mesh_of

pytestmark = pytest.mark.simnpu


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


POLICIES = {
    "fp32": (F32, {}),
    "fp32 shards, bf16 compute, fp32 reduce": (F32, {"param_dtype": BF16, "reduce_dtype": F32}),
    "fp32 shards, bf16 reduce": (F32, {"param_dtype": BF16, "reduce_dtype": BF16}),
    "fp32 shards, fp16 reduce": (F32, {"param_dtype": F16, "reduce_dtype": F16}),
    "bf16 shards": (BF16, {}),
    "bf16 shards, fp32 reduce": (BF16, {"reduce_dtype": F32}),
    "fp16 shards": (F16, {}),
    "fp16 shards, fp32 reduce": (F16, {"reduce_dtype": F32}),
}


MESHES = {"1-D": (4,), "HSDP": (2, 2), "HSDP of 1": (4, 1), "DDP": (1, 4)}


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_bits_for_every_dtype_and_divisor(mesh):
    """Division and cast come after the hook: fp16 and forced sums are divided there."""

    def rank_main(rank):
        cases = [(name, {}) for name in POLICIES]
        cases += [("fp32", {"divisor": 8.0}), ("bf16 shards, fp32 reduce", {"divisor": 3.0})]
        for name, options in cases:
            dtype, policy = POLICIES[name]
            torch.manual_seed(0)
            model = offloaded(
                Model().to(dtype),
                mesh_of("hccl", MESHES[mesh], ("replicate", "shard")[-len(MESHES[mesh]) :]),
                mp_policy=MixedPrecisionPolicy(**policy),
            )
            if "divisor" in options:
                for module in (model, model.middle):
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(options["divisor"])
            early = NormBeforeOffload(model)
            train_once(model, 1, policy.get("param_dtype", dtype))
            grads = {p.grad.dtype for p in model.parameters()}
            assert grads == {dtype}
            first, _ = compare(early, model)
            assert first.num_early == ALL, (name, first.host_passes)
            assert first.total_norm > 0
        return True

    assert all(run_ranks(rank_main, 4, backend="hccl", timeout_s=55))


def test_shards_of_another_dim_and_accumulation_without_all_reduce():
    def rank_main(rank):
        mesh = mesh_of("hccl", (2, 2), ("replicate", "shard"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(13, 8), nn.Linear(8, 6))
        fully_shard(
            model,
            mesh=mesh,
            offload_policy=CPUOffloadPolicy(),
            shard_placement_fn=lambda param: Shard(1) if param.shape == (6, 8) else Shard(0),
        )
        early = NormBeforeOffload(model)
        for micro_batch in range(3):
            model.set_requires_all_reduce(requires_all_reduce=micro_batch == 2)
            train_once(model, micro_batch)
        first, _ = compare(early, model)
        return first.num_early

    assert run_ranks(rank_main, 4, backend="hccl") == [4] * 4


def test_shards_of_several_chunks(monkeypatch):
    """Chunks are of 4 Mi elements; here of 100, each with telling elements of its own."""
    from hyper_parallel.platform.torch import device_sums

    def rank_main(rank):
        monkeypatch.setattr(device_sums, "DEVICE_CHUNK_NUMEL", 100)
        torch.manual_seed(0)
        model = offloaded(nn.Linear(13, 101))
        early = NormBeforeOffload(model)
        train_once(model, 1)
        first, _ = compare(early, model)
        assert first.num_early == 2
        model.zero_grad()
        train_once(model, 1)
        weight = model.weight.grad.to_local().view(-1)
        last = weight[600:]
        last.data.mul_(0.5)
        second, _ = compare(early, model)
        return second.num_early

    assert run_ranks(rank_main, 2, backend="hccl") == [1, 1]


def test_norm_is_exactly_rounded():
    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        truth = exact(model.parameters())
        return clip_grad_norm_(model.parameters(), 1e9).item(), truth

    results = run_ranks(rank_main, 3, backend="hccl")
    for norm, _ in results:
        assert_rounds_sqrt(torch.tensor(norm), sum(part for _, part in results))


@pytest.mark.parametrize(
    "axes", [{"tp_size": 2}, {"ep_size": 4}, {"tp_size": 2, "ep_size": 4}], ids=str
)
def test_tensor_and_expert_parallel(axes):
    """Several rank sets in one buffer under TP, and experts on a mesh of their own."""
    from hyper_parallel.trainer.config import parse_config
    from hyper_parallel.trainer.train import Trainer

    tp_size = axes.get("tp_size", 1)
    config = parse_config(
        {
            "model": {"dim": 16, "num_heads": 2, "mlp_dim": 24, "expert_dim": 8, "num_experts": 4},
            "training": {"norm_before_offload": False, "batch_size": 2, "seq_len": 16},
            "accelerator": axes,
            "fsdp_config": {"dp_shard_size": 4 // tp_size, "enable_offload": True},
        }
    )

    def rank_main(rank):
        trainer = Trainer(config)
        early = NormBeforeOffload(trainer.model)
        trainer.forward_backward(1)
        first, _ = compare(early, trainer.model, trainer.reducer)
        num_parameters = len(list(trainer.model.parameters()))
        assert first.num_early == num_parameters, first.host_passes
        return first.total_norm.item(), len(first.norms_by_rank_set)

    results = run_ranks(rank_main, 4, backend="hccl", timeout_s=55)
    assert {norm for norm, _ in results} == {results[0][0]}
    if tp_size > 1:
        assert results[0][1] > 1


@pytest.mark.parametrize("declared", ["stages", "stages with a copy", "hand-made experts"])
def test_declared_groups(declared):
    """Lanes that are read for pipeline peers, counted elsewhere, or unions of rank sets."""

    def rank_main(rank):
        grid = mesh_of("hccl", (2, 2), ("outer", "inner"))
        outer, inner = grid["outer"], grid["inner"]
        torch.manual_seed(0)
        model = offloaded(Model(), inner)
        early = NormBeforeOffload(model)
        train_once(model, 1)
        groups = {
            "stages": {"pp_group": outer.get_group()},
            "stages with a copy": {
                "pp_group": outer.get_group(),
                "replicated_over": {model.up.weight: outer.get_group()},
            },
            "hand-made experts": {
                "sharded_over": {p: outer.get_group() for p in model.middle.parameters()}
            },
        }[declared]
        first, second = compare(early, model, NormReducer(model, **groups))
        assert first.num_early == ALL, first.host_passes
        assert first.replica_spread == second.replica_spread
        return first.total_norm.item()

    norms = run_ranks(rank_main, 4, backend="hccl")
    if declared != "hand-made experts":
        assert len(set(norms)) == 1


def test_replicas_that_differ_are_seen():
    """hsdp: the lanes that early sums went into are compared like any others."""

    def rank_main(rank):
        mesh = mesh_of("hccl", (2, 2), ("replicate", "shard"))
        torch.manual_seed(0)
        model = offloaded(Model(), mesh)
        NormBeforeOffload(model)
        train_once(model, 1)
        if rank >= 2:
            model.up.weight.grad.to_local().mul_(2.0)
        result = NormReducer(model).clip_(model.parameters(), math.inf)
        return result.num_early, result.replica_spread

    results = run_ranks(rank_main, 4, backend="hccl")
    assert [num for num, _ in results] == [ALL, ALL, ALL - 1, ALL - 1]
    assert len({spread for _, spread in results}) == 1
    assert results[0][1] > 1e-3


def test_one_rank_without_a_group_to_reduce_over():
    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        early = NormBeforeOffload(model)
        train_once(model, 1)
        first, _ = compare(early, model)
        assert first.num_early == ALL
        assert first.copies.d2h == 1
        return first.host_bytes_read

    assert run_ranks(rank_main, 1, backend="hccl") == [0]


def test_group_that_reduces_elsewhere():
    """Sums are on the NPU, the group was made for the CPU: they are fetched."""

    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        early = NormBeforeOffload(model)
        on_cpu = dist.new_group(backend="gloo")
        train_once(model, 1)
        first, _ = compare(early, model, NormReducer(model, group=on_cpu))
        assert first.num_early == ALL
        return first.total_norm.item(), NormReducer(model).clip_(model, 1e9).total_norm.item()

    for result in run_ranks(rank_main, 2, backend=HOST_AND_NPU):
        assert result[0] == result[1]


def test_unsharded_gradients_beside_sharded_ones():
    """FSDP2 on a mesh of one rank gives each rank gradients of its own."""

    def rank_main(rank):
        torch.manual_seed(0)
        alone = mesh_of("hccl", (2, 1), ("all", "alone"))["alone"]
        models = [offloaded(Model()), offloaded(Model(), alone)]
        early = [NormBeforeOffload(model) for model in models]
        for model in models:
            train_once(model, 1)
        listed = [p for model in models for p in model.parameters()]
        first = NormReducer().clip_(listed, math.inf)
        assert first.num_early == 2 * ALL
        for hooks in early:
            hooks.invalidate()
        second = NormReducer().clip_(listed, math.inf)
        assert first.norms_by_rank_set == second.norms_by_rank_set
        assert set(first.norms_by_rank_set) == {(), (0, 1)}
        return first.total_norm.item(), second.total_norm.item()

    for first, second in run_ranks(rank_main, 2, backend="hccl"):
        assert first == second


@pytest.mark.parametrize(
    ("early", "late"),
    [(1.6e38, 0.0), (0.0, 1.6e38), (1.18e38, 1.18e38)],
    ids=["on the device", "on the host", "half and half"],
)
def test_finite_gradient_of_infinite_norm_is_seen(early, late):
    """Either half of the last case is below the limit; 5 elements each."""

    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(nn.Linear(13, 5))
        NormBeforeOffload(model)
        x = torch.zeros(1, 13)
        x[0, 0] = early
        model(x.to("npu")).sum().backward()
        model.bias.grad.to_local().fill_(late)
        assert NormReducer().clip_(model, math.inf).num_early == 1
        with pytest.raises(RuntimeError, match="finite gradients is infinite") as raised:
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return str(raised.value)

    text, other = run_ranks(rank_main, 2, backend="hccl")
    assert text == other
