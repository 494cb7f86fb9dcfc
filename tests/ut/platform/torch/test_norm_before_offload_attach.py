"""Attaching the hook that takes norms: other hooks, models that have no use for it, failures."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from hyper_parallel import NormBeforeOffload, NormReducer, clip_grad_norm_
from tests.early import ALL, Model, compare, offloaded, train_once
from tests.ranks import run_ranks
from tests.sharding import mesh_of

pytestmark = pytest.mark.simnpu


def test_attach_detach_and_context_manager():
    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        used = []

        def step():
            model.zero_grad()
            train_once(model, 1)
            used.append(NormReducer(model).clip_(model.parameters(), math.inf).num_early)

        with NormBeforeOffload(model) as early:
            step()
        step()
        early.attach()
        early.attach()
        step()
        train_once_more = list(model.parameters())
        early.detach()
        used.append(NormReducer(model).clip_(train_once_more, math.inf).num_early)
        early.detach()
        step()
        return used

    assert run_ranks(rank_main, 2, backend="hccl") == [[ALL, 0, ALL, 0, 0]] * 2


def test_hook_that_is_there_already_runs_first_and_comes_back():
    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        doubled = []

        def double(buffer):
            buffer.mul_(2.0)
            doubled.append(buffer.numel())

        model.set_all_reduce_hook(double)
        early = NormBeforeOffload(model)
        train_once(model, 1)
        first, _ = compare(early, model)
        assert first.num_early == ALL
        early.detach()
        train_once(model, 1)
        return len(doubled)

    assert run_ranks(rank_main, 2, backend="hccl") == [2, 2]


def test_hook_that_replaces_ours_ends_the_early_norms_of_its_module():
    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        early = NormBeforeOffload(model)
        train_once(model, 1)
        model.set_all_reduce_hook(lambda buffer: buffer.mul_(2.0))
        model.zero_grad()
        train_once(model, 1)
        first, _ = compare(early, model)
        early.detach()  # leaves theirs
        return first.num_early

    assert run_ranks(rank_main, 2, backend="hccl") == [4, 4]


@pytest.mark.parametrize("kind", ["plain", "resident", "several groups"])
def test_model_that_cannot_be_hooked_is_an_error_that_says_why(kind):
    def rank_main(rank):
        model = nn.Linear(4, 4)
        mesh = mesh_of("hccl", (2,))
        if kind == "resident":
            fully_shard(model.to("npu"), mesh=mesh)
        elif kind == "several groups":
            from torch.distributed.fsdp._fully_shard._fsdp_common import (
                FSDPMeshInfo,
                ShardPlacementResult,
            )

            one = mesh_of("hccl", (2, 1), ("a", "b"))["b"]
            placements = {
                model.weight: ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, 0)),
                model.bias: ShardPlacementResult(Shard(0), FSDPMeshInfo(one, 0)),
            }
            fully_shard(
                model,
                mesh=mesh,
                offload_policy=CPUOffloadPolicy(),
                shard_placement_fn=placements.get,
            )
        with pytest.raises(ValueError, match="offload gradients") as raised:
            NormBeforeOffload(model)
        return str(raised.value)

    reason = {
        "plain": "it has no module of FSDP2",
        "resident": "the model: its gradients stay on the device",
        "several groups": "the model: it has several parameter groups",
    }[kind]
    for text in run_ranks(rank_main, 2, backend="hccl"):
        assert reason in text


def test_second_attachment_is_an_error():
    def rank_main(rank):
        model = offloaded(Model())
        early = NormBeforeOffload(model)
        with pytest.raises(ValueError, match="has a NormBeforeOffload already"):
            NormBeforeOffload(model)
        early.detach()
        NormBeforeOffload(model)

    run_ranks(rank_main, 2, backend="hccl")


def test_partly_hooked_model_says_what_is_not():
    def rank_main(rank):
        model = Model()
        mesh = mesh_of("hccl", (2,))
        model.middle.to("npu")
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        early = NormBeforeOffload(model)
        assert early.uncovered == {"middle": "its gradients stay on the device"}
        train_once(model, 1)
        first, _ = compare(early, model)
        return first.num_early

    assert run_ranks(rank_main, 2, backend="hccl") == [4, 4]


def test_gradients_are_not_kept_alive():

    def rank_main(rank):
        from hyper_parallel.platform.torch import early_norms

        model = offloaded(Model())
        early = NormBeforeOffload(model)
        train_once(model, 1)
        watched = [weakref.ref(p.grad.to_local()) for p in model.parameters()]
        locals_ = [weakref.ref(p.grad._local_tensor) for p in model.parameters()]
        model.zero_grad()
        assert not any(ref() is not None for ref in watched + locals_)
        early.detach()
        return len(early_norms._known)

    assert run_ranks(rank_main, 2, backend="hccl") == [0, 0]


def test_failure_on_the_device_falls_back_with_one_warning(monkeypatch, caplog):
    from hyper_parallel.platform.torch import norm_before_offload

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory for 3 GiB")

    def rank_main(rank):
        if rank == 1:
            monkeypatch.setattr(norm_before_offload, "measure_chunks", out_of_memory)
        model = offloaded(Model())
        early = NormBeforeOffload(model)
        for _ in range(2):
            model.zero_grad()
            train_once(model, 1)
            first, _ = compare(early, model)
        warnings = [record for record in caplog.records if "no memory" in record.getMessage()]
        return first.num_early, len(warnings)

    assert run_ranks(rank_main, 2, backend="hccl") == [(ALL, 0), (0, 2)]


def test_failure_while_packing_on_one_rank_is_raised_by_all(monkeypatch):
    from hyper_parallel.platform.torch import norm_reducer

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory for lanes")

    def rank_main(rank):
        model = offloaded(Model())
        NormBeforeOffload(model)
        NormReducer(model)
        train_once(model, 1)
        if rank == 1:
            monkeypatch.setattr(norm_reducer, "pack_on_device", out_of_memory)
        with pytest.raises(RuntimeError, match=r"rank 1: .*no memory for lanes") as raised:
            clip_grad_norm_(model, 1.0)
        return str(raised.value)

    text, other = run_ranks(rank_main, 2, backend="hccl")
    assert text == other


@pytest.mark.parametrize("attached", [True, False])
def test_failure_of_the_reduction_is_not_taken_for_ours(attached):
    """Launches report what failed before them; such a gradient must not be trained on.

    The groups behind the simulator cannot multiply before they add.
    """

    def rank_main(rank):
        model = offloaded(Model())
        model.set_gradient_divide_factor(7.0)
        early = NormBeforeOffload(model)
        if not attached:
            early.detach()
        with pytest.raises(RuntimeError, match="PREMUL_SUM"):
            train_once(model, 1)

    run_ranks(rank_main, 2, backend="hccl")


def test_device_that_lacks_an_operator_is_found_out_at_set_up(monkeypatch):
    from hyper_parallel.platform.torch import device_sums

    def not_implemented(*_):
        raise NotImplementedError("no such operator on this device")

    def rank_main(rank):
        monkeypatch.setattr(device_sums, "_fineness", not_implemented)
        model = offloaded(Model())
        with pytest.raises(ValueError, match="middle: its device has no float64, or lacks"):
            NormBeforeOffload(model)

    run_ranks(rank_main, 2, backend="hccl")
