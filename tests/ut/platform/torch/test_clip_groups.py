"""Which ranks reduce, where, and in what state of torch: none of it may hang or change the norm."""

import logging
import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm, reduction_group
from hyper_parallel.platform.torch import meeting, reduction_groups
from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.platform.torch.staging_buffer import StagingBuffer
from tests.clipping import error_of
from tests.ranks import HOST_AND_NPU, run_ranks
from tests.sharding import both, dense, expert, groupless_mesh, mesh_of, parameter


@both
def test_new_rank_set_at_step_3_costs_one_exchange(backend):
    """Nobody has seen it before, and only half of the ranks see it now."""

    def rank_main(rank):
        old = dense(backend)
        mesh = mesh_of(backend, (2, 2), ("replicate", "shard"))
        new = parameter(torch.full((4,), 50.0), mesh, [Replicate(), Shard(0)])
        reducer = NormReducer()
        trace = []
        for step in range(6):
            params = [old, new] if step >= 3 and rank < 2 else [old]
            result = reducer.clip_(params, math.inf)
            trace.append((round(result.total_norm.item(), 3), result.copies.collectives))
        return trace

    results = run_ranks(rank_main, 4, backend=backend)
    alone, joint = 106.958, 146.424
    for rank, trace in enumerate(results):
        norm = joint if rank < 2 else alone
        assert [n for n, _ in trace] == [alone] * 3 + [norm] * 3
        # The first: lengths, hashes, members, then the reduce. A new one: a reduce before, too.
        assert [c for _, c in trace] == [4, 1, 1, 5, 1, 1]


@pytest.mark.simnpu
def test_first_gradient_of_one_rank_on_a_new_rank_set_costs_the_simulated_npu_one_exchange():
    """The same norm on all ranks, and 1/1/1/1 again from the next step on."""
    from hyper_parallel.testing import simnpu

    def rank_main(rank):
        halves = mesh_of("hccl", (2, 2), ("replicate", "shard"))
        old = parameter(torch.full((4,), 2.0), halves, [Replicate(), Shard(0)])
        new = parameter(torch.full((4,), 3.0), mesh_of("hccl", (4,)), [Shard(0)])
        reducer = NormReducer()
        trace = []
        for step in range(6):
            params = [old, new] if step >= 3 and rank == 2 else [old]
            simnpu.reset_counters()
            norm = reducer.clip_(params, math.inf).total_norm.item()
            counters = simnpu.counters()
            cost = [counters[key] for key in ("h2d", "collectives", "d2h", "host_syncs")]
            trace.append((norm, cost))
        return trace

    results = run_ranks(rank_main, 4, backend="hccl")
    assert all(trace == results[0] for trace in results)
    norms = [norm for norm, _ in results[0]]
    assert norms == [4.0] * 3 + [5.0] * 3
    costs = [cost for _, cost in results[0]]
    # One reduce tells all ranks to exchange: lengths, hashes, members. Then they reduce again.
    assert costs[3][1] == 5
    assert [costs[step] for step in (1, 2, 4, 5)] == [[1, 1, 1, 1]] * 4


@both
def test_lists_filtered_down_to_a_few_dtensors(backend):
    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        kept = {0: params, 1: params[1:], 2: params[:1], 3: params}[rank]
        return clip_grad_norm_(kept, 1.0).item()

    norms = run_ranks(rank_main, 4, backend=backend)
    assert len(set(norms)) == 1
    grads = torch.arange(1.0, 33.0).reshape(4, 8), 3 * torch.arange(1.0, 65.0).reshape(4, 4, 4)
    lost_dense = grads[0][1]  # of rank 1
    lost_expert = grads[1][2:, :2]  # of rank 2: (ep 1, efsdp 0)
    total = sum(g.square().sum() for g in grads) - lost_dense.square().sum()
    assert norms[0] == pytest.approx((total - lost_expert.square().sum()).sqrt().item())


def test_reducer_joins_even_if_a_filter_left_no_dtensor():
    def rank_main(rank):
        model = torch.nn.Module()
        model.weight = dense("gloo")
        reducer = NormReducer(model)
        params = [] if rank == 3 else list(model.parameters())
        result = reducer.clip_(params, 1.0)
        return result.total_norm.item(), result.copies.collectives

    assert run_ranks(rank_main, 4) == [(70.0, 1)] * 4


def test_function_without_any_dtensor_on_a_rank_names_that_rank_to_the_others():
    def rank_main(rank):
        if rank == 2:
            return clip_grad_norm_([parameter(torch.tensor([3.0]))], 1.0).item()
        return str(error_of([dense("gloo")], 1.0))

    messages = run_ranks(rank_main, 4, group_timeout_s=2, timeout_s=15)
    assert messages[2] == 3.0
    for rank in (0, 1, 3):
        assert "rank(s) 2 did not come" in messages[rank]
        assert "NormReducer(model)" in messages[rank]


def test_late_rank_is_waited_for_and_named_in_the_log():
    def rank_main(rank):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("hyper_parallel").addHandler(handler)
        meeting._patience = meeting.timedelta(seconds=0.3)
        param = dense("gloo")
        dist.barrier()
        if rank == 1:
            time.sleep(3.5)  # a file store counts whole seconds
        norm = clip_grad_norm_([param], 1.0).item()
        return round(norm, 3), lines

    for rank, (norm, lines) in enumerate(run_ranks(rank_main, 4)):
        assert norm == 106.958
        if rank != 1:
            assert len(lines) == 1
            assert "waiting for rank(s) 1 " in lines[0]


def test_group_that_lacks_this_rank_is_refused():
    def rank_main(rank):
        group = dist.new_group([0, 1])
        if rank >= 2:
            with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
                clip_grad_norm_([parameter(torch.ones(1))], 1.0, group=group)
            return None
        return clip_grad_norm_([parameter(torch.tensor([3.0]))], 1.0, group=group).item()

    assert run_ranks(rank_main, 4) == [3.0, 3.0, None, None]


def test_group_that_lacks_ranks_of_a_mesh_is_refused_by_all_its_ranks():
    def rank_main(rank):
        group = dist.new_group([0, 1])
        param = dense("gloo")
        if rank >= 2:
            return None
        return str(error_of([param], 1.0, group=group))

    messages = run_ranks(rank_main, 4)
    for rank in (0, 1):
        assert "ranks 2-3" in messages[rank]
        assert "reduction_group" in messages[rank]


def test_group_without_a_usable_backend_is_refused_early(tmp_path):
    """pytorch#136156: the error came from deep inside and did not say what to do."""

    def rank_main(rank, folder):
        def create(store, rank, size, timeout):
            return dist.ProcessGroupGloo(store, rank, size, timeout)

        dist.Backend.register_backend("elsewhere", create, devices=["xpu"])
        store = dist.FileStore(os.path.join(folder, "store"), 2)
        dist.init_process_group("xpu:elsewhere", store=store, rank=rank, world_size=2)
        with pytest.raises(ValueError, match=r"xpu:elsewhere.*cpu:gloo"):
            clip_grad_norm_([parameter(torch.ones(1))], 1.0, group=dist.group.WORLD)

    run_ranks(rank_main, 2, str(tmp_path), backend="none")


@pytest.mark.simnpu
def test_group_with_both_backends_uses_the_accelerator_whoever_is_resident():
    def rank_main(rank):
        backend = HOST_AND_NPU
        params = [dense(backend, on_host=rank % 2 == 0), expert(backend, on_host=rank < 2)]
        reducer = NormReducer()
        reducer.clip_(params, math.inf)
        result = reducer.clip_(params, 1.0)
        assert result.copies == Copies(h2d=1, collectives=1, d2h=1, host_syncs=1)
        assert result.total_norm.device.type == ("cpu" if rank == 0 else "npu")
        return result.total_norm.item()

    norms = run_ranks(rank_main, 4, backend=HOST_AND_NPU)
    assert len(set(norms)) == 1
    assert round(norms[0], 3) == 903.549


@both
def test_reduction_group_of_the_ranks_that_train(backend):
    def rank_main(rank):
        from torch.distributed.device_mesh import DeviceMesh

        world_mesh = mesh_of(backend, (2, 2), ("job", "fsdp"))
        mesh = world_mesh["fsdp"]
        assert isinstance(mesh, DeviceMesh)
        group = reduction_group(None if rank < 2 else mesh)
        if rank < 2:
            assert group is dist.group.WORLD
            return None
        assert dist.get_process_group_ranks(group) == [2, 3]
        param = parameter(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
        return clip_grad_norm_([param], 1.0, group=group).item()

    assert run_ranks(rank_main, 4, backend=backend) == [None, None, 5.0, 5.0]


def test_reduction_group_of_a_mesh_over_all_ranks_is_the_default_group():
    def rank_main(rank):
        return reduction_group(mesh_of("gloo", (2, 2))) is dist.group.WORLD

    assert run_ranks(rank_main, 4) == [True] * 4


def test_reduction_group_of_a_mesh_without_this_rank_is_an_error_on_all():
    """It was torch's marker for a group that one is not in, which fails later and elsewhere."""

    def rank_main(rank):
        mesh = groupless_mesh("cpu", (2,), range(2, 4))
        with pytest.raises(ValueError, match="not part of the mesh") as raised:
            reduction_group(None if rank == 0 else mesh)
        return str(raised.value)

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert "rank(s) 1 are not part" in messages[0]


def test_reduction_group_needs_torch_distributed():
    with pytest.raises(ValueError, match="initialized"):
        reduction_group(None)


def test_group_without_torch_distributed_is_refused():
    with pytest.raises(ValueError, match="not initialized"):
        clip_grad_norm_([parameter(torch.ones(1))], 1.0, group=object())


@pytest.mark.simnpu
def test_current_device_of_the_caller_does_not_matter():
    """The event was recorded on another device's stream, and the buffer read too early."""

    def rank_main(rank):
        d = dense("hccl")
        norms = [clip_grad_norm_([d], math.inf).item()]
        for other in (5, 7 - rank):
            with torch.npu.device(other):
                norms.append(clip_grad_norm_([d], math.inf).item())
        return [round(norm, 3) for norm in norms]

    assert run_ranks(rank_main, 4, backend="hccl") == [[106.958] * 3] * 4


@pytest.mark.simnpu
def test_reducer_may_be_made_before_the_device_is_chosen():
    def rank_main(rank):
        torch.npu.set_device(0)
        reducer = NormReducer()
        torch.npu.set_device(rank)
        reducer.clip_([dense("hccl")], math.inf)
        return reducer._group.device.index

    assert run_ranks(rank_main, 4, backend="hccl") == [0, 1, 2, 3]


@both
@pytest.mark.parametrize("default", ["meta", "npu"])
@pytest.mark.parametrize("option", ["", "optimizer", "reproducible"])
@pytest.mark.simnpu
def test_default_device_does_not_matter(backend, option, default):
    from hyper_parallel.testing import simnpu

    simnpu.install()

    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        optimizer = torch.optim.AdamW(params, fused=True) if option == "optimizer" else None
        torch.set_default_device(default)
        reducer = NormReducer(reproducible=option == "reproducible")
        reducer.clip_(params, math.inf, optimizer=optimizer)
        result = reducer.clip_(params, 1.0, optimizer=optimizer)
        moves = 1 if backend == "hccl" else 0
        assert (result.copies.h2d, result.copies.d2h) == (moves, moves)
        assert result.total_norm.device.type == "cpu"
        return round(result.total_norm.item(), 3)

    assert run_ranks(rank_main, 4, backend=backend) == [903.549] * 4


@both
def test_buffer_made_in_inference_mode_serves_later_clips(backend):
    """On one rank only it left the others waiting."""

    def rank_main(rank):
        param = dense(backend)
        with torch.inference_mode(rank == 0):
            first = get_total_norm([param.grad]).item()
        return first == clip_grad_norm_([param], math.inf).item()

    assert run_ranks(rank_main, 4, backend=backend) == [True] * 4


def test_rank_that_came_too_late_meets_the_others_when_they_try_again():
    def rank_main(rank):
        param = dense("gloo")
        if rank == 1:
            time.sleep(3)  # a file store counts whole seconds: the others wait two each time
        else:
            assert "rank(s) 1 did not come" in str(error_of([param], 1.0))
        return round(clip_grad_norm_([param], math.inf).item(), 3)

    assert run_ranks(rank_main, 4, group_timeout_s=1.5) == [106.958] * 4


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_compiled_caller_clips(p):
    def rank_main(rank):
        param = dense("gloo")
        compiled = torch.compile(lambda: clip_grad_norm_([param], 1.0, p), backend="eager")
        norm = compiled().item()
        return norm, get_total_norm([param.grad], p).item()

    for norm, after in run_ranks(rank_main, 4, timeout_s=50):
        assert round(norm, 3) == (106.958 if p == 2.0 else 32.0)
        assert after == pytest.approx(1.0, abs=1e-6)


def test_ranks_on_different_kinds_of_devices_are_told_at_the_first_meeting():
    def rank_main(rank):
        from hyper_parallel.platform.torch.reduction_groups import resolve_group

        group = resolve_group(None)
        if rank == 1:
            group.__dict__["device"] = torch.device("cuda", 0)  # what a rank without it would miss
        with pytest.raises(ValueError, match="another kind of device"):
            meeting.meet(group)

    run_ranks(rank_main, 2)


def test_rank_without_a_usable_device_is_told_to_all_at_the_first_meeting():
    """It raised alone, and the others waited for it until the timeout."""

    def rank_main(rank):
        if rank == 1:

            def fail(group):
                raise ValueError("no backend of the group can be used here")

            reduction_groups._resolve_device = fail
        error = error_of([dense("gloo")], 1.0)
        assert isinstance(error, ValueError)
        return str(error)

    others, own, *_ = run_ranks(rank_main, 4, timeout_s=8)
    assert "no backend of the group can be used here" in own
    assert "another kind of device, or on none" in others


def test_value_error_of_one_rank_in_a_collective_is_not_taken_for_that_of_all():
    """Such as int(nan): it came out bare, as if all ranks had decided it."""

    def rank_main(rank):
        params = [dense("gloo")]
        clip_grad_norm_(params, math.inf)
        if rank == 1:

            def fail(*args):
                raise ValueError("cannot convert float NaN to integer")

            StagingBuffer.reduce = fail
        error = error_of(params, 1.0)
        assert isinstance(error, RuntimeError)
        return str(error)

    for rank, message in enumerate(run_ranks(rank_main, 4, group_timeout_s=2)):
        assert f"rank {rank}: the reduction of the gradient norm failed" in message
        assert "ValueError: cannot convert float NaN" in message or rank == 1
