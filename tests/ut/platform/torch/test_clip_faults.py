"""What goes wrong on one rank: nobody hangs, all raise alike, no gradient changes."""

import logging
import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm, reduction_group
from hyper_parallel.platform.torch import exchange, partial_norms
from tests.ranks import RankFailedError, run_ranks
from tests.sharding import dense, expert, local_grad, mesh_of, parameter, parameter_of_shard

BACKENDS = [pytest.param("gloo"), pytest.param("hccl", marks=pytest.mark.simnpu)]
both = pytest.mark.parametrize("backend", BACKENDS)


def error_of(params, *args, **options):
    """Clip, expect an error and unchanged gradients; return the error."""
    before = [None if p.grad is None else local_grad(p).clone() for p in params]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        clip_grad_norm_(params, *args, **options)
    for param, grad in zip(params, before, strict=True):
        assert grad is None or torch.equal(local_grad(param), grad)
    return raised.value


@both
def test_failing_host_pass_is_raised_by_all_and_the_next_clip_works(backend):
    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        clip_grad_norm_(params, math.inf)
        works = partial_norms._measure_on_host
        if rank == 1:

            def fail(tensors, norm_type):
                raise MemoryError("host pass broke")

            partial_norms._measure_on_host = fail
        error = error_of(params, 1.0)
        partial_norms._measure_on_host = works
        return type(error).__name__, str(error), clip_grad_norm_(params, 1.0).item()

    results = run_ranks(rank_main, 4, backend=backend)
    assert len(set(results)) == 1
    kind, message, norm = results[0]
    assert kind == "RuntimeError"
    assert "rank 1: MemoryError: host pass broke" in message
    assert "no gradient was changed" in message
    assert round(norm, 3) == 903.549


def spoil_with(kind):
    """Return a bad parameter that rank 2 adds to its list, and what the error must say."""
    if kind == "float8":
        param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn), requires_grad=False)
        param.main_grad = torch.zeros(4, dtype=torch.float8_e4m3fn)
        return param, "float8_e4m3fn"
    if kind == "meta":
        param = torch.nn.Parameter(torch.zeros(4, device="meta"))
        param.grad = torch.zeros(4, device="meta")
        return param, "meta device"
    if kind == "csr":
        param = parameter(torch.zeros(2, 2))
        param.main_grad = torch.sparse_csr_tensor(
            [0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), check_invariants=True
        )
        return param, "torch.sparse_csr"
    if kind == "expanded":
        param = parameter(torch.zeros(4))
        param.main_grad = torch.ones(1).expand(4)
        return param, "expanded"
    if kind == "inference":
        param = parameter(torch.zeros(4))
        with torch.inference_mode():
            param.main_grad = torch.ones(4)
        return param, "inference tensor"
    if kind == "partial-max":
        shard = torch.ones(4)
        param = parameter_of_shard(shard, mesh_of("gloo", (4,)), [Partial("max")])
        return param, "Partial"
    return "weight", "is a str"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "kind", ["float8", "meta", "csr", "expanded", "inference", "partial-max", "not-a-tensor"]
)
def test_bad_gradient_on_one_rank_is_named_by_all(kind):
    """pytorch#121020: an error in the middle of the scaling left half the gradients scaled."""

    def rank_main(rank):
        params = [dense("gloo")]
        bad, text = spoil_with(kind)
        before = local_grad(params[0]).clone()
        listed = [bad, *params] if rank == 2 else params
        with pytest.raises(TypeError) as raised:
            clip_grad_norm_(listed, 1.0)
        assert torch.equal(local_grad(params[0]), before)
        message = str(raised.value)
        assert "rank 2" in message
        assert "parameters[0]" in message
        assert text in message
        return message

    assert len(set(run_ranks(rank_main, 4))) == 1


def test_several_bad_gradients_are_all_named():
    good = parameter(torch.tensor([3.0, 4.0]))
    expanded, inference = spoil_with("expanded")[0], spoil_with("inference")[0]
    with pytest.raises(TypeError, match=r"parameters\[0\].*expanded.*parameters\[2\].*inference"):
        clip_grad_norm_([expanded, good, inference], 1.0)
    assert good.grad.tolist() == [3.0, 4.0]
    assert get_total_norm([expanded.main_grad, inference.main_grad]).item() == pytest.approx(8**0.5)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda rank: (1.0 + (rank == 3),),
        lambda rank: (1.0, 1.0 if rank == 3 else 2.0),
        lambda rank: (1.0, math.inf if rank == 3 else 2.0),
        lambda rank: (1.0, -math.inf if rank == 3 else math.inf),
        lambda rank: (1.0, 2.0, rank == 3),
    ],
    ids=["max_norm", "norm_type", "norm_type-inf", "norm_type-minus-inf", "error_if_nonfinite"],
)
def test_different_clips_on_different_ranks_are_an_error_on_all(arguments):
    def rank_main(rank):
        error = error_of([dense("gloo")], *arguments(rank))
        assert isinstance(error, ValueError)
        return str(error)

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert "rank(s) 0-2" in messages[0]
    assert "rank(s) 3" in messages[0]


@pytest.mark.parametrize("bad", [-1.0, math.nan, "one"])
def test_bad_max_norm_on_one_rank_is_raised_by_all(bad):
    def rank_main(rank):
        error = error_of([dense("gloo")], bad if rank == 1 else 1.0)
        return str(error)

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert "rank(s) 1: ValueError" in messages[0]


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
        started = time.monotonic()
        error = error_of([dense("gloo")], 1.0)
        assert time.monotonic() - started < 10
        return str(error)

    messages = run_ranks(rank_main, 4, group_timeout_s=2)
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
        exchange._PATIENCE = exchange.timedelta(seconds=0.3)
        param = dense("gloo")
        if rank == 1:
            time.sleep(1.5)
        norm = clip_grad_norm_([param], 1.0).item()
        return round(norm, 3), lines

    for rank, (norm, lines) in enumerate(run_ranks(rank_main, 4)):
        assert norm == 106.958
        if rank != 1:
            assert len(lines) == 1
            assert "waiting for rank(s) 1 " in lines[0]


@both
def test_rank_that_dies_gives_the_others_an_error_and_whole_gradients(backend):
    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        clip_grad_norm_(params, math.inf)
        if rank == 1:
            os._exit(0)
        return str(error_of(params, 1.0))

    with pytest.raises(RankFailedError) as raised:
        run_ranks(rank_main, 4, backend=backend, group_timeout_s=5)
    text = str(raised.value)
    assert "--- rank 1 ---\ndied without a word" in text
    for rank in (0, 2, 3):
        assert f"--- rank {rank} ---" not in text


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
        backend = "cpu:gloo,npu:hccl"
        params = [dense(backend, on_host=rank % 2 == 0), expert(backend, on_host=rank < 2)]
        reducer = NormReducer()
        reducer.clip_(params, math.inf)
        result = reducer.clip_(params, 1.0)
        fetches = 0 if rank == 0 else 1
        assert result.copies.collectives == 1
        assert result.copies.d2h == 1 + fetches
        assert result.total_norm.device.type == ("cpu" if rank == 0 else "npu")
        return result.total_norm.item()

    norms = run_ranks(rank_main, 4, backend="cpu:gloo,npu:hccl")
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


def test_reduction_group_needs_torch_distributed():
    with pytest.raises(ValueError, match="initialized"):
        reduction_group(None)


def test_group_without_torch_distributed_is_refused():
    with pytest.raises(ValueError, match="not initialized"):
        clip_grad_norm_([parameter(torch.ones(1))], 1.0, group=object())


def test_partial_gradients_that_differ_in_size_are_refused_by_all():
    def rank_main(rank):
        mesh = mesh_of("gloo", (4,))
        param = parameter_of_shard(torch.ones(3 + (rank == 1)), mesh, [Partial()])
        return str(error_of([param], 1.0))

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert "parameters[0]" in messages[0]


@both
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_partial_gradient_that_some_ranks_lack(backend, op):
    """2-D: summed over `replicate`, sharded over `shard`; rank 3's addend is missing."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("replicate", "shard"))
        addend = torch.full((5,), float(rank + 1))
        param = parameter_of_shard(addend, mesh, [Partial(op), Shard(0)])
        plain = dense(backend)
        if rank == 3:
            param.grad = None
        norms = [clip_grad_norm_([param, plain], math.inf, p).item() for p in (2.0, math.inf)]
        return norms, get_total_norm([plain.grad]).item()

    share = 1.0 if op == "sum" else 0.5
    sums = torch.cat([torch.full((5,), 1.0 + 3.0), torch.full((5,), 2.0)]).double() * share
    both_grads = torch.cat([sums, torch.arange(1.0, 33.0).double()])
    expected = [torch.linalg.vector_norm(both_grads, p).item() for p in (2.0, math.inf)]
    for norms, after in run_ranks(rank_main, 4, backend=backend):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert round(after, 3) == 106.958


def test_nan_in_a_partial_gradient_reaches_all_ranks():
    def rank_main(rank):
        mesh = mesh_of("gloo", (4,))
        param = parameter_of_shard(torch.ones(6), mesh, [Partial()])
        if rank == 1:
            local_grad(param)[4] = math.nan
        norm = clip_grad_norm_([param], math.inf).item()
        before = local_grad(param).clone()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
        torch.testing.assert_close(local_grad(param), before, equal_nan=True)
        return norm

    assert all(math.isnan(norm) for norm in run_ranks(rank_main, 4))
