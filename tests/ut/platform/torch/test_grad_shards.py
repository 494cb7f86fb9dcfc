"""Parameters to gradient shards with their rank sets."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hyper_parallel.platform.torch import grad_shards
from hyper_parallel.platform.torch.grad_shards import (
    GradShard,
    collect_grad_shards,
    foretell_grad_shards,
)
from hyper_parallel.platform.torch.parameter_list import ParameterList
from hyper_parallel.platform.torch.reach import KnownReaches, Reach
from tests.ranks import run_ranks
from tests.sharding import mesh_of, parameter, parameter_of_shard

EVERYONE = tuple(range(8))
# Mesh (2, 4) over 8 ranks; rank 5 is at (1, 1).
REACHES = {
    "fsdp-and-ep": ([Shard(0), Shard(1)], EVERYONE, None),
    "hsdp": ([Replicate(), Shard(0)], (4, 5, 6, 7), None),
    "first-dim-only": ([Shard(1), Replicate()], (1, 5), None),
    "replicated": ([Replicate(), Replicate()], (), None),
    "partial-sum": ([Partial(), Replicate()], (1, 5), ((1, 5), "sum")),
    "partial-avg-of-shards": ([Partial("avg"), Shard(0)], EVERYONE, ((1, 5), "avg")),
    "partial-over-both": ([Partial(), Partial()], EVERYONE, (EVERYONE, "sum")),
}


def test_rank_set_is_the_sub_mesh_along_the_dims_with_distinct_elements():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 4))
        found = {}
        for name, (placements, _, _) in REACHES.items():
            param = torch.nn.Parameter(torch.zeros(8, 8))
            param.main_grad = DTensor.from_local(
                torch.ones(8, 8), mesh, placements, run_check=False
            )
            [shard] = collect_grad_shards(ParameterList([param]))
            pending = shard.pending and (shard.pending.ranks, shard.pending.op)
            found[name] = (shard.rank_set, pending)
        return found

    found = run_ranks(rank_main, 8)[5]
    assert found == {name: (ranks, pending) for name, (_, ranks, pending) in REACHES.items()}


def test_mesh_dims_of_size_one_and_ranks_outside_the_mesh_hold_whole_gradients():
    def rank_main(rank):
        one = mesh_of("gloo", (1, 2))
        pair = DeviceMesh("cpu", [0])
        params = [
            parameter(torch.ones(4, 4), one, [Shard(0), Replicate()]),
            parameter_of_shard(torch.ones(4, 4), one, [Partial(), Replicate()]),
            parameter(torch.ones(4, 4), pair, [Shard(0)]),
        ]
        return [
            (shard.rank_set, shard.pending, shard.local.numel())
            for shard in collect_grad_shards(ParameterList(params))
        ]

    whole = ((), None, 16)
    assert run_ranks(rank_main, 2) == [[whole] * 3, [whole, whole, ((), None, 0)]]


def test_plain_gradient_of_a_sharded_parameter_has_the_parameters_rank_set():
    def rank_main(rank):
        param = parameter(None, mesh_of("gloo", (2,)), [Shard(0)], shape=(4,))
        param.main_grad = torch.ones(2)
        [shard] = collect_grad_shards(ParameterList([param]))
        assert shard.local is param.main_grad
        return shard.rank_set

    assert run_ranks(rank_main, 2) == [(0, 1), (0, 1)]


def test_pending_collective_of_a_local_tensor_is_waited_for():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
        param = parameter(None, mesh, [Replicate()], shape=(4,))
        param.main_grad = partial.redistribute(mesh, [Replicate()])
        with torch.no_grad():
            [shard] = collect_grad_shards(ParameterList([param]))
        assert type(shard.local) is torch.Tensor
        return shard.local.tolist()

    assert run_ranks(rank_main, 2) == [[2.0] * 4] * 2


def test_names_come_from_the_module_else_from_place_and_shape():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    named = ParameterList(module)
    assert [named.describe(i) for i in range(2)] == ["0.weight", "0.bias"]
    unnamed = ParameterList(module.parameters())
    assert unnamed.describe(1) == "parameters[1] of shape (3,)"
    reminded = ParameterList([module[0].bias], named.names)
    assert reminded.describe(0) == "0.bias"


def test_gradients_are_collected_in_order_and_once():
    first, second, frozen = (parameter(torch.ones(n)) for n in (1, 2, 3))
    frozen.grad = None
    shards = collect_grad_shards(ParameterList([second, frozen, first, second]))
    assert list(shards) == [
        GradShard(second.grad, (), None, 0),
        GradShard(first.grad, (), None, 2),
    ]


def test_main_grad_made_anew_at_every_access_is_collected_of_each_parameter():
    """Ids of tensors that are gone are given out again: most were skipped, neither counted."""

    class Fresh(torch.nn.Parameter):
        @property
        def main_grad(self):
            return DTensor.from_local(torch.ones(2), self.mesh, [Shard(0)], run_check=False)

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        params = [Fresh(torch.zeros(2)) for _ in range(300)]
        for param in params:
            param.mesh = mesh
        return len(collect_grad_shards(ParameterList([*params, *params])))

    assert run_ranks(rank_main, 2) == [300, 300]


def test_one_gradient_under_two_parameters_is_scaled_once():
    first, second = (parameter(torch.ones(2)) for _ in range(2))
    second.main_grad = first.main_grad = torch.ones(2)
    assert len(collect_grad_shards(ParameterList([first, second]))) == 1


def test_rank_sets_of_a_model_foretell_those_of_its_gradients():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2))
        params = [
            parameter(torch.ones(4, 4), mesh, placements)
            for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate()] * 2)
        ]
        foretold = foretell_grad_shards(ParameterList(params)).lane_keys
        shards = collect_grad_shards(ParameterList(params))
        assert foretold == {shard.rank_set for shard in shards if shard.rank_set}
        return foretold

    assert run_ranks(rank_main, 4)[3] == {(0, 1, 2, 3), (2, 3)}


def test_only_writable_gradients_are_collected_for_scaling():
    grad = torch.ones(1).expand(3)
    listed = ParameterList([grad], are_gradients=True)
    assert len(collect_grad_shards(listed, writable=False)) == 1
    with pytest.raises(TypeError, match="expanded"):
        collect_grad_shards(listed)


def spoil(params, case):
    """Change a list of DTensor parameters so that the quick way may not take all of it."""
    match case:
        case "gaps":
            for param in params[5::7]:
                param.grad = None
        case "twice":
            params += params[3:5]
        case "main-grad" | "fault":
            dtype = torch.float32 if case == "main-grad" else torch.int64
            params[1500].main_grad = torch.ones(4, dtype=dtype)
        case "no-tensor":
            params.append(3)
        case "grad-without-mesh":
            params[1502].grad = torch.ones(4)
        case "some-whole":
            for index in range(0, 2100, 9):
                params[index] = torch.zeros(3, requires_grad=True)
                params[index].grad = torch.full((3,), float(index))
        case "pending":
            mesh = params[0].device_mesh
            addend = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
            params[7].grad = addend


def outcome_of(listed):
    try:
        shards = collect_grad_shards(listed)
    except TypeError as error:
        return str(error)
    return [(shard.local.data_ptr(), *shard[1:]) for shard in shards]


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "gaps",
        "twice",
        "main-grad",
        "fault",
        "no-tensor",
        "pending",
        "gradients",
        "some-whole",
        "grad-without-mesh",
    ],
)
def test_collecting_many_at_once_is_like_one_by_one(case):
    """The quick way must find what the loop finds, or leave the list to it."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2,))
        placements = [Replicate(), Shard(0), Shard(0)]
        params = [
            parameter(torch.full((4,), float(i)), mesh, [placements[i % 3]]) for i in range(2100)
        ]
        spoil(params, case)
        are_gradients = case == "gradients"
        tensors = [param.grad for param in params] if are_gradients else params
        listed = ParameterList(tensors, are_gradients=are_gradients)
        is_quick = grad_shards._collect_at_once(listed) is not None
        quickly = outcome_of(listed)
        grad_shards._collect_at_once = lambda parameters: None
        return is_quick, quickly, outcome_of(listed)

    for is_quick, quickly, one_by_one in run_ranks(rank_main, 2):
        assert quickly == one_by_one
        assert is_quick == (case in ("plain", "gaps", "gradients", "some-whole"))


def test_reaches_are_not_remembered_across_ranks():
    """The same spec on another rank, as after torch.distributed was started anew."""
    known = KnownReaches()

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2))
        grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=False)
        known._rank = 99
        known._reaches[id(grad._spec)] = Reach((7, 8))
        [reach] = known.of([grad])
        return reach.rank_set

    assert run_ranks(rank_main, 4) == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_shards_are_told_apart_by_rank_set_and_by_what_is_pending():
    """Two meshes that span the same ranks share a lane; a Partial gradient waits for its sum."""

    def rank_main(rank):
        flat, square = mesh_of("gloo", (4,)), mesh_of("gloo", (2, 2))
        placements = [
            (flat, [Shard(0)]),
            (square, [Shard(0), Replicate()]),
            (square, [Shard(0), Shard(1)]),
            (square, [Partial(), Replicate()]),
            (flat, [Replicate()]),
        ]
        grads = [
            DTensor.from_local(torch.ones(4, 4), mesh, how, run_check=False)
            for mesh, how in placements
        ]
        shards = collect_grad_shards(ParameterList(grads, are_gradients=True))
        assert shards.pending.positions == [3]
        return dict(shards.whole.indices_by_rank_set())

    by_rank = run_ranks(rank_main, 4)
    everyone = tuple(range(4))
    assert by_rank[0] == {everyone: [0, 2], (0, 2): [1], (): [3]}
    assert by_rank[3] == {everyone: [0, 2], (1, 3): [1], (): [3]}


def test_only_dense_host_shards_are_plain():
    """What is taken for plain goes to the kernels by its address."""

    def rank_main(rank):
        params = [parameter(torch.ones(4, 4), mesh_of("gloo", (2,)), [Shard(0)]) for _ in range(3)]
        plain = collect_grad_shards(ParameterList(params)).are_plain
        mesh = params[0].device_mesh
        params[1].grad = DTensor.from_local(torch.ones(4, 2).t(), mesh, [Shard(0)], run_check=False)
        return plain, collect_grad_shards(ParameterList(params)).are_plain

    assert run_ranks(rank_main, 2) == [(True, False)] * 2
