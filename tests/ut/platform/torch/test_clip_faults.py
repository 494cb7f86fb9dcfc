"""What goes wrong on one rank: nobody hangs, all raise alike, no gradient changes."""

import math
import os

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial

from hyper_parallel import (
    NormReducer,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
)
from hyper_parallel.platform.torch import partial_norms
from tests.clipping import error_of
from tests.ranks import RankFailedError, run_ranks
from tests.sharding import both, dense, expert, local_grad, mesh_of, parameter, parameter_of_shard


@both
def test_failing_host_pass_is_raised_by_all_and_the_next_clip_works(backend):
    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        clip_grad_norm_(params, math.inf)
        works = partial_norms.host.partial_norms
        if rank == 1:

            def fail(tensors, norm_type):
                raise MemoryError("host pass broke")

            partial_norms.host.partial_norms = fail
        error = error_of(params, 1.0)
        partial_norms.host.partial_norms = works
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
    """Found before anything is scaled, and told to all."""

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


class StubbornTensor(torch.Tensor):
    """Can be measured, but not multiplied in place."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.mul_:
            raise NotImplementedError("no mul_ here")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("broken", ["kernel", "class of a tensor"])
def test_error_inside_the_scale_pass_leaves_gradients_whole(monkeypatch, broken):
    """pytorch#121020: half of the gradients were scaled."""
    sparse = torch.nn.Parameter(torch.zeros(4))
    sparse.grad = torch.tensor([0.0, 2.0, 0.0, 4.0]).to_sparse()
    dense_param = parameter(torch.tensor([3.0, 4.0]))
    stubborn = parameter(torch.ones(1))
    stubborn.main_grad = torch.ones(4, 4)[:, ::2]
    if broken == "kernel":

        def fail(tensors, coef):
            raise MemoryError("no room for a plan")

        monkeypatch.setattr(partial_norms.host, "scale_", fail)
    else:
        stubborn.main_grad = stubborn.main_grad.as_subclass(StubbornTensor)
    with pytest.raises((MemoryError, NotImplementedError)):
        clip_grad_norm_([sparse, dense_param, stubborn], 1.0)
    assert sparse.grad.to_dense().tolist() == [0.0, 2.0, 0.0, 4.0]
    assert dense_param.grad.tolist() == [3.0, 4.0]
    assert torch.equal(stubborn.main_grad.as_subclass(torch.Tensor), torch.ones(4, 2))


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


@pytest.mark.parametrize("odd_rank", [0, 3])
def test_lanes_of_different_formats_are_not_read(odd_rank):
    """Infinity in a MAX lane is no digit: the ranks that expect digits failed alone."""

    def rank_main(rank):
        grad = torch.full((8,), 1e300, dtype=torch.float64)
        param = parameter(grad, mesh_of("gloo", (4,)), [Shard(0)])
        error = error_of([param], 1.0, 2.0 if rank == odd_rank else math.inf)
        assert isinstance(error, ValueError)
        return clip_grad_norm_([param], math.inf, math.inf).item()

    assert run_ranks(rank_main, 4) == [1e300] * 4


@pytest.mark.parametrize("bad", [-1.0, math.nan, "one"])
def test_bad_max_norm_on_one_rank_is_raised_by_all(bad):
    def rank_main(rank):
        error = error_of([dense("gloo")], bad if rank == 1 else 1.0)
        return str(error)

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert "rank(s) 1: ValueError" in messages[0]


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


@pytest.mark.parametrize("layout", ["unsharded", "replica"])
@pytest.mark.parametrize("p", [2.0, 1.0])
def test_infinite_norm_of_finite_gradients_on_one_rank_is_raised_by_all(layout, p):
    """Rank 0 raised, and the others had scaled: no vote covered what only rank 0 reads."""

    def rank_main(rank):
        large = torch.full((4,), 3e38)
        if layout == "unsharded":
            params = [dense("gloo"), parameter(large if rank == 0 else torch.ones(4))]
        else:
            mesh = mesh_of("gloo", (2, 2), ("replicate", "shard"))
            shard = large if rank < 2 else torch.ones(4)
            params = [parameter_of_shard(shard, mesh, [Replicate(), Shard(0)])]
        message = str(error_of(params, 1.0, p, error_if_nonfinite=True))
        return message, clip_grad_norm_(params, math.inf, p).isinf().item()

    results = run_ranks(rank_main, 4)
    assert len({message for message, _ in results}) == 1
    assert "rank 0: the norm is beyond torch.float32" in results[0][0]
    infinite = 1 if layout == "unsharded" else 2
    assert [is_inf for _, is_inf in results] == [True] * infinite + [False] * (4 - infinite)


@pytest.mark.parametrize("p", [1e-310, 1e-3, 1e308])
def test_extreme_orders_do_not_fail_on_one_rank(p):
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("replicate", "shard"))
        shard = torch.full((4,), 3.0 if rank < 2 else 0.0)
        param = parameter_of_shard(shard, mesh, [Replicate(), Shard(0)])
        return clip_grad_norm_([param], math.inf, p).item()

    assert run_ranks(rank_main, 4) == [math.inf, math.inf, 0.0, 0.0]


def test_error_whose_message_cannot_be_printed_does_not_hang_the_others():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def rank_main(rank):
        param = dense("gloo")

        def listing():
            yield param
            if rank == 1:
                raise MuteError

        with pytest.raises(RuntimeError, match="rank 1: MuteError: "):
            clip_grad_norm_(listing(), 1.0)

    run_ranks(rank_main, 4)


def test_complex_magnitude_beyond_float32_is_infinite_on_any_number_of_ranks():
    grad = torch.full((2,), complex(3e38, 3e38), dtype=torch.complex64)
    assert get_total_norm([grad], math.inf).isinf()

    def rank_main(rank):
        param = parameter(grad, mesh_of("gloo", (2,)), [Shard(0)])
        return get_total_norm([param.grad], math.inf).item()

    assert run_ranks(rank_main, 2) == [math.inf, math.inf]


def test_nothing_to_measure_is_no_reason_to_raise():
    """The -inf norm of nothing is inf."""

    def rank_main(rank):
        param = parameter(torch.ones(1), mesh_of("gloo", (2,)), [Shard(0)])
        if rank == 0:
            param.grad = None
        return clip_grad_norm_([param], 1.0, -math.inf, error_if_nonfinite=True).item()

    assert run_ranks(rank_main, 2) == [math.inf, math.inf]


def test_minus_zero_is_the_same_request_as_zero():
    def rank_main(rank):
        param = dense("gloo")
        return clip_grad_norm_([param], math.inf, -0.0 if rank else 0.0).item()

    assert run_ranks(rank_main, 4) == [32.0] * 4


@both
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("named", [True, False], ids=["module", "list"])
def test_nonfinite_gradients_of_several_ranks_are_named_with_counts(backend, named, p):
    """And without raising the result holds the same."""

    def rank_main(rank):
        module = torch.nn.Module()
        module.plain = parameter(torch.ones(3))
        module.dense, module.expert = dense(backend), expert(backend, on_host=False)
        if rank == 0:
            module.plain.grad[1] = math.nan
            local_grad(module.dense)[0, :3] = -math.inf
        if rank == 3:
            local_grad(module.expert)[0, 0, :2] = math.nan
        listed = module if named else list(module.parameters())
        reducer = NormReducer(module if named else None)
        before = [local_grad(param).clone() for param in module.parameters()]
        found = reducer.clip_(listed, math.inf, p).nonfinite
        with pytest.raises(RuntimeError) as raised:
            reducer.clip_(listed, 1.0, p, error_if_nonfinite=True)
        for param, grad in zip(module.parameters(), before, strict=True):
            torch.testing.assert_close(local_grad(param), grad, rtol=0, atol=0, equal_nan=True)
        return [(f.name, f.num_nan, f.num_inf) for f in found], str(raised.value)

    results = run_ranks(rank_main, 4, backend=backend)
    plain, dense_, expert_ = (
        ("plain", "dense", "expert")
        if named
        else [f"parameters[{i}] of shape {s}" for i, s in enumerate([(3,), (8, 4), (4, 4, 4)])]
    )
    assert [found for found, _ in results] == [
        [(plain, 1, 0), (dense_, 0, 3)],
        [],
        [],
        [(expert_, 2, 0)],
    ]
    assert len({message for _, message in results}) == 1
    expected = f"rank 0: {plain} (1 NaN, 0 inf); {dense_} (0 NaN, 3 inf); rank 3: {expert_} (2 NaN"
    assert expected in results[0][1]


@both
def test_norm_that_has_to_be_gathered_is_so_whatever_one_rank_cannot_scale(backend):
    """torch's own total norm of DTensors; the others came to the gathering, and waited."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2,))
        param = parameter(torch.full((4,), 3.0), mesh, [Shard(0)])
        total_norm = DTensor.from_local(
            torch.full((), 6.0, device=mesh.device_type), mesh, [_NormPartial(2)]
        )
        spoiled = [param, spoil_with("float8")[0]] if rank == 1 else [param]
        try:
            clip_grads_with_norm_(spoiled, 1.0, total_norm)
        except TypeError as error:
            return "float8_e4m3fn" in str(error), local_grad(param).tolist()
        return False, local_grad(param).tolist()

    whole, scaled = run_ranks(rank_main, 2, backend=backend)
    assert scaled == (True, [3.0, 3.0])
    assert whole[0] is False
    assert whole[1] == pytest.approx([3.0 / 72**0.5] * 2)
