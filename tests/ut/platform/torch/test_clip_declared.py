"""Tensors declared as sharded or replicated over a group, though no DTensor says so."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from hyper_parallel.platform.torch.clip_result import Copies
from tests.clipping import error_of
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import both, local_grad, mesh_of, parameter, parameter_of_shard


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@both
def test_plain_experts_are_sharded_over_their_group(backend):
    """2 x EP 2: each rank holds its experts as plain tensors, beside a dense weight."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("dp", "ep"))
        expert = parameter(values(rank % 2, 5))
        dense = parameter(values(7, 8), mesh, [Shard(0), Shard(0)])
        declared = {expert: mesh.get_group("ep")}
        clip_grad_norm_([dense, expert], math.inf, sharded_over=declared)
        norm = clip_grad_norm_([dense, expert], 1.0, sharded_over=declared)
        left = clip_grad_norm_([dense, expert], math.inf, sharded_over=declared)
        alone = get_total_norm([expert.grad], sharded_over={expert.grad: mesh.get_group("ep")})
        return norm, left.item(), alone

    experts = [values(0, 5), values(1, 5)]
    for norm, left, alone in run_ranks(rank_main, 4, backend=backend):
        assert_rounds_sqrt(norm, exact_pow_sum([*experts, values(7, 8)]))
        assert left == pytest.approx(1, abs=1e-5)
        # get_total_norm of scaled gradients
        assert alone.item() == pytest.approx(
            math.sqrt(exact_pow_sum(experts)) / norm.item(), rel=1e-5
        )


@both
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_fsdp_over_efsdp_with_hand_made_ep(backend, p):
    """The DTensor knows efsdp alone; its rank set is the union over the ep group's ranks."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("efsdp", "ep"))
        # Different on each ep rank; sharded over efsdp.
        expert = parameter(values(rank % 2, 4, 3), mesh["efsdp"], [Shard(0)])
        dense = parameter(values(7, 8), mesh, [Shard(0), Shard(0)])
        model = torch.nn.ParameterList([expert, dense])
        reducer = NormReducer(model, sharded_over={expert: mesh.get_group("ep")})
        results = [reducer.clip_(model, math.inf, p) for _ in range(2)]
        moves = 1 if backend == "hccl" else 0
        assert [r.copies for r in results] == [Copies(moves, 1, moves, moves)] * 2
        assert list(results[0].norms_by_rank_set) == [(0, 1, 2, 3)]
        return results[1].total_norm

    grads = [values(0, 4, 3), values(1, 4, 3), values(7, 8)]
    for norm in run_ranks(rank_main, 4, backend=backend):
        if p == 2.0:
            assert_rounds_sqrt(norm, exact_pow_sum(grads))
        else:
            assert norm == max(grad.abs().max() for grad in grads)


def test_union_is_known_though_a_rank_has_no_gradient():
    """At the first clip, and when another model's tensors were agreed on before."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("efsdp", "ep"))
        expert = parameter(
            None if rank == 3 else values(rank % 2, 4), mesh["efsdp"], [Shard(0)], shape=(4,)
        )
        clip_grad_norm_([parameter(torch.ones(8), mesh, [Shard(0)] * 2)], math.inf)
        ep = {expert: mesh.get_group("ep")}
        return clip_grad_norm_([expert], 1.0, sharded_over=ep)

    held = [values(0, 4), values(1, 4)[:2]]
    for norm in run_ranks(rank_main, 4):
        assert_rounds_sqrt(norm, exact_pow_sum(held))


def test_hand_made_ep_inside_hsdp_counts_replicas_once():
    """Mesh replicate 2 x efsdp 2 x ep 2: the union stays inside this rank's replica."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2, 2), ("replicate", "efsdp", "ep"))
        expert = parameter(values(rank % 2, 4), mesh["replicate", "efsdp"], [Replicate(), Shard(0)])
        reducer = NormReducer(sharded_over={expert: mesh.get_group("ep")})
        result = reducer.clip_([expert], math.inf)
        mine = tuple(range(4)) if rank < 4 else tuple(range(4, 8))
        assert list(result.norms_by_rank_set) == [mine]
        return result.total_norm

    for norm in run_ranks(rank_main, 8):
        assert_rounds_sqrt(norm, exact_pow_sum([values(0, 4), values(1, 4)]))


def test_partial_gradient_of_a_tensor_declared_as_sharded():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("dp", "ep"))
        expert = parameter_of_shard(values(rank, 6).round(), mesh["dp"], [Partial()])
        ep = {expert: mesh.get_group("ep")}
        return clip_grad_norm_([expert], math.inf, sharded_over=ep)

    sums = [values(e, 6).round() + values(e + 2, 6).round() for e in range(2)]
    for norm in run_ranks(rank_main, 4):
        assert_rounds_sqrt(norm, exact_pow_sum(sums))


def test_models_that_share_a_mesh_shape_take_turns():
    """The same rank set and group on ranks 0 and 1 has another union in each model."""

    def rank_main(rank):
        meshes = [
            (DeviceMesh("cpu", grid, mesh_dim_names=("efsdp", "ep")), seed)
            for seed, grid in enumerate(([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        ]
        turns = []
        for mesh, seed in meshes:
            expert = parameter(
                values(10 * seed + mesh.get_local_rank("ep"), 4), mesh["efsdp"], [Shard(0)]
            )
            turns.append((expert, NormReducer(sharded_over={expert: mesh.get_group("ep")})))
        norms = []
        for _ in range(3):
            norms += [reducer.clip_([expert], math.inf).total_norm for expert, reducer in turns]
        return norms

    exact = [exact_pow_sum([values(10 * seed + e, 4) for e in range(2)]) for seed in range(2)]
    for norms in run_ranks(rank_main, 4):
        for i, norm in enumerate(norms):
            assert_rounds_sqrt(norm, exact[i % 2])


@both
def test_tied_embeddings_count_once_and_are_scaled_everywhere(backend):
    """PP 3, plain tensors: the first and the last stage hold the same embedding."""

    def rank_main(rank):
        pp = mesh_of(backend, (3,), ("pp",)).get_group()
        ends = dist.new_group([0, 2])
        tied = parameter(values(5, 6))
        own = parameter(values(rank, 4))
        ours = [own] if rank == 1 else [own, tied]
        copies = None if rank == 1 else {tied: ends}
        norm = clip_grad_norm_(ours, 1.0, pp_group=pp, replicated_over=copies)
        left = clip_grad_norm_(ours, math.inf, pp_group=pp, replicated_over=copies)
        return norm, left.item(), tied.grad

    results = run_ranks(rank_main, 3, backend=backend)
    grads = [values(5, 6), *(values(rank, 4) for rank in range(3))]
    for norm, left, _ in results:
        assert_rounds_sqrt(norm, exact_pow_sum(grads))
        assert left == pytest.approx(1, abs=1e-5)
    assert results[0][2].equal(results[2][2])
    assert not results[0][2].equal(values(5, 6))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3, 2, 1]], ids=["in-order", "crossed"])
def test_tied_embeddings_sharded_in_each_stage_count_once(order):
    """PP 2 x FSDP 2; crossed: the copies' lowest ranks are on different stages."""

    def rank_main(rank):
        stages = torch.tensor(order).reshape(2, 2)
        mesh = DeviceMesh("cpu", stages, mesh_dim_names=("pp", "fsdp"))
        tied = parameter(values(5, 8), mesh["fsdp"], [Shard(0)])
        own = parameter(values(mesh.get_local_rank("pp"), 8), mesh["fsdp"], [Shard(0)])
        pp = mesh.get_group("pp")
        model = torch.nn.ParameterList([tied, own])
        reducer = NormReducer(model, pp_group=pp, replicated_over={tied: pp})
        result = reducer.clip_(model, 1.0)
        assert result.copies.collectives == 1
        return result.total_norm, float(local_grad(tied).norm())

    for norm, left in run_ranks(rank_main, 4):
        assert_rounds_sqrt(norm, exact_pow_sum([values(5, 8), values(0, 8), values(1, 8)]))
        assert left < 1


def test_tied_vocabulary_shards_as_plain_tensors():
    """PP 2 x TP 2, by hand: sharded over tp and replicated over the stages."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("pp", "tp"))
        tied = parameter(values(5 + rank % 2, 4))
        pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
        return clip_grad_norm_(
            [tied], math.inf, pp_group=pp, sharded_over={tied: tp}, replicated_over={tied: pp}
        )

    for norm in run_ranks(rank_main, 4):
        assert_rounds_sqrt(norm, exact_pow_sum([values(5, 4), values(6, 4)]))


def test_copies_outside_the_stages_count_once_anyway():
    """Data parallel copies of plain tensors: each rank adds up its own column of stages."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("pp", "dp"))
        param = parameter(values(rank // 2, 4))
        copies = {param: mesh.get_group("dp")}
        return clip_grad_norm_(
            [param], math.inf, pp_group=mesh.get_group("pp"), replicated_over=copies
        )

    for norm in run_ranks(rank_main, 4):
        assert_rounds_sqrt(norm, exact_pow_sum([values(0, 4), values(1, 4)]))


def declared_wrongly(case, mesh):
    """Return parameters and arguments that contradict each other or name what is not there."""
    rows, columns = mesh.get_group("b"), mesh.get_group("a")
    plain = parameter(torch.ones(2))
    sharded = parameter(torch.ones(4), mesh["b"], [Shard(0)])
    both_dims = parameter(torch.ones(4), mesh, [Replicate(), Shard(0)])
    partial = parameter_of_shard(torch.ones(4), mesh["b"], [Partial()])
    stages = {"pp_group": columns}
    return {
        "not-listed": ([plain], {"sharded_over": {plain.grad: rows}}),
        "not-listed-copy": ([plain], {**stages, "replicated_over": {sharded: columns}}),
        "no-tensor": ([plain], {"sharded_over": {"expert": rows}}),
        "sharded-and-replicated": (
            [plain],
            {**stages, "sharded_over": {plain: rows}, "replicated_over": {plain: rows}},
        ),
        "replicated-by-its-mesh": ([both_dims], {"sharded_over": {both_dims: columns}}),
        "sharded-by-its-mesh": ([sharded], {**stages, "replicated_over": {sharded: rows}}),
        "no-stages": ([sharded], {"sharded_over": {}, "replicated_over": {sharded: columns}}),
        "not-of-the-stages": (
            [sharded],
            {**stages, "replicated_over": {sharded: dist.group.WORLD}},
        ),
        "partial-copy": ([partial], {**stages, "replicated_over": {partial: columns}}),
    }[case]


WRONG = {
    "not-listed": (ValueError, "1 of the tensors in sharded_over and replicated_over are not"),
    "not-listed-copy": (ValueError, "one of shape (4,)"),
    "no-tensor": (TypeError, "expected tensors as keys of sharded_over, got a str"),
    "sharded-and-replicated": (ValueError, "both sharded and replicated over ranks"),
    "replicated-by-its-mesh": (ValueError, "but its DTensor is replicated over them"),
    "sharded-by-its-mesh": (ValueError, "but its DTensor is sharded over them"),
    "no-stages": (ValueError, "takes a pp_group that holds all copies"),
    "not-of-the-stages": (ValueError, "but its DTensor is sharded over them"),
    "partial-copy": (ValueError, "its gradient is Partial"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_declarations_are_refused_by_all(case):
    """On one rank only: the others learn of it."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("a", "b"))
        params, arguments = declared_wrongly(case, mesh)
        if rank != 1:  # declares the stages alone, if any
            kept = {name: arguments[name] for name in arguments if name == "pp_group"}
            arguments = kept or {"sharded_over": {}}
        error = error_of(params, 1.0, **arguments)
        return type(error), str(error)

    outcomes = run_ranks(rank_main, 4)
    kind, text = WRONG[case]
    for found, message in outcomes:
        assert found is kind
        assert "rank 1: " in message
        assert text in message


@pytest.mark.parametrize("kind", ["silent", "other-mesh", "other-group"])
@both
def test_tensors_sharded_over_a_group_by_some_of_its_ranks_are_refused_by_all(kind, backend):
    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("efsdp", "ep"))
        world = mesh_of(backend, (4,), ("all",))
        expert = parameter(values(0, 4), mesh["efsdp"], [Shard(0)])
        ep = mesh.get_group("ep")
        declared = {expert: ep}
        if rank == 3 and kind == "silent":
            declared = {}
        if rank == 3 and kind == "other-mesh":
            expert = parameter(values(0, 4), world, [Shard(0)])
            declared = {expert: ep}
        if rank == 3 and kind == "other-group":
            declared = {expert: mesh.get_group("efsdp")}
        message = str(error_of([expert], 1.0, sharded_over=declared))
        mended = parameter(values(rank % 2, 4), mesh["efsdp"], [Shard(0)])
        return message, clip_grad_norm_([mended], math.inf, sharded_over={mended: ep})

    results = run_ranks(rank_main, 4, backend=backend)
    assert len({message for message, _ in results}) == 1
    assert "sharded_over" in results[0][0]
    assert f"rank(s) {1 if kind == 'other-group' else 3} declared none" in results[0][0]
    for _, norm in results:
        assert_rounds_sqrt(norm, exact_pow_sum([values(0, 4), values(1, 4)]))


def test_meshes_of_one_shape_under_one_declared_group_are_told_apart_by_name():
    def rank_main(rank):
        grids = [[0, 1], [2, 3]], [[0, 1], [3, 2]]

        def clip(names):
            meshes = [
                DeviceMesh("cpu", g, mesh_dim_names=n) for g, n in zip(grids, names, strict=True)
            ]
            experts = [
                parameter(
                    values(10 * i + m.get_local_rank(1), 4), m[m.mesh_dim_names[0]], [Shard(0)]
                )
                for i, m in enumerate(meshes)
            ]
            ep = dist.new_group([0, 1]), dist.new_group([2, 3])
            group = ep[rank // 2]
            return experts, dict.fromkeys(experts, group)

        experts, declared = clip([("x", "ep"), ("x", "ep")])
        message = str(error_of(experts, 1.0, sharded_over=declared))
        experts, declared = clip([("x", "ep"), ("y", "ep")])
        return message, clip_grad_norm_(experts, math.inf, sharded_over=declared)

    for message, norm in run_ranks(rank_main, 4):
        assert "give the meshes' dims names" in message
        assert_rounds_sqrt(norm, exact_pow_sum([values(s, 4) for s in (0, 1, 10, 11)]))


def test_reducer_refuses_a_wrong_declaration_on_all_ranks():
    def rank_main(rank):
        model = torch.nn.Linear(2, 2)
        stranger = torch.nn.Parameter(torch.ones(1))
        tensor = stranger if rank == 1 else model.weight
        with pytest.raises(ValueError, match=r"could not be set up. rank 1: .* not among"):
            NormReducer(model, sharded_over={tensor: dist.group.WORLD})
        reducer = NormReducer(model, sharded_over={model.weight: dist.group.WORLD})
        model.bias.grad = torch.ones(2)  # a list without the declared tensor is fine then
        return reducer.clip_([model.bias], 1.0).total_norm.item()

    assert run_ranks(rank_main, 2) == [pytest.approx(math.sqrt(2))] * 2


def test_without_torch_distributed_declared_groups_are_refused():
    param = parameter(torch.ones(1))
    with pytest.raises(ValueError, match="pp_group was given, but torch"):
        clip_grad_norm_([param], 1.0, pp_group=object())
    with pytest.raises(ValueError, match="sharded_over was given, but torch"):
        clip_grad_norm_([param], 1.0, sharded_over={param: object()})
