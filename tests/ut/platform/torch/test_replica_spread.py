"""Replicas whose norms differ: told in the result, and once in the log."""

import logging
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel import NormReducer
from hyper_parallel.platform.torch.clip_result import Copies
from tests.ranks import run_ranks
from tests.sharding import both, mesh_of, parameter, parameter_of_shard


def caught_warnings():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hyper_parallel").addHandler(handler)
    return lines


def shard(rank, mesh, scale=1.0):
    """1, 2, 3, 4 sharded over two ranks; the second replica's times `scale`."""
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank % 2]
    return parameter_of_shard(values * (scale if rank >= 2 else 1.0), mesh, [Replicate(), Shard(0)])


@both
def test_spread_is_the_relative_difference_of_norms(backend):
    cases = [
        (p, scale)
        for scale in (1.0, 1.0005, 1.25)
        for p in (2.0, 1.0, 3.0, 0.5, math.inf, -math.inf)
    ]

    def rank_main(rank):
        lines = caught_warnings()
        mesh = mesh_of(backend, (2, 2), ("replicate", "shard"))
        reducer = NormReducer()
        reducer.clip_([shard(rank, mesh)], math.inf)
        moves = 1 if backend == "hccl" else 0
        spreads = []
        for p, scale in cases:
            result = reducer.clip_([shard(rank, mesh, scale)], math.inf, p)
            assert result.copies == Copies(moves, 1, moves, moves)
            spreads.append(result.replica_spread)
        return spreads, lines

    results = run_ranks(rank_main, 4, backend=backend)
    for rank, (spreads, lines) in enumerate(results):
        assert spreads == [pytest.approx(1 - 1 / scale, abs=1e-7) for _, scale in cases]
        assert len(lines) == (1 if rank == 2 else 0)
    smaller = math.sqrt(30)
    assert f"a norm of {1.25 * smaller:.9g} on ranks 2-3" in results[2][1][0]
    assert f"and of {smaller:.9g} on ranks 0-1: " in results[2][1][0]


def test_three_replicas_name_the_two_that_are_farthest_apart():
    def rank_main(rank):
        lines = caught_warnings()
        mesh = mesh_of("gloo", (3, 2), ("replicate", "shard"))
        local = torch.tensor([[3.0], [5.0], [4.0]])[rank // 2]
        param = parameter_of_shard(local, mesh, [Replicate(), Shard(0)])
        return NormReducer().clip_([param], 1.0).replica_spread, lines

    results = run_ranks(rank_main, 6)
    assert [spread for spread, _ in results] == [pytest.approx(0.4)] * 6
    assert [len(lines) for _, lines in results] == [0, 0, 1, 0, 0, 0]
    assert "on ranks 2-3 and of" in results[2][1][0]
    assert "on ranks 0-1:" in results[2][1][0]


@pytest.mark.parametrize(("bad", "spread"), [(math.nan, math.inf), (math.inf, math.inf)])
def test_element_of_one_replica_that_is_not_finite(bad, spread):
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("replicate", "shard"))
        param = shard(rank, mesh, bad if rank == 3 else 1.0)
        return NormReducer().clip_([param], math.inf).replica_spread

    assert run_ranks(rank_main, 4) == [spread] * 4


def test_not_finite_on_all_replicas_is_no_spread():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 1), ("replicate", "shard"))
        pair = mesh_of("gloo", (1, 2), ("replicate", "shard"))
        param = parameter_of_shard(torch.tensor([math.nan]), pair, [Replicate(), Shard(0)])
        lone = parameter_of_shard(torch.tensor([1.0 + rank]), mesh, [Replicate(), Shard(0)])
        return NormReducer().clip_([param, lone], math.inf).replica_spread

    assert run_ranks(rank_main, 2) == [0.0, 0.0]


@pytest.mark.parametrize("lacking", [0, 1])
def test_gradient_that_one_replica_lacks_is_a_spread(lacking):
    """A step would part the replicas. It takes a lane for the lacking one: a model that has it."""

    def rank_main(rank):
        lines = caught_warnings()
        mesh = mesh_of("gloo", (2, 2), ("replicate", "shard"))
        model = torch.nn.ParameterList([shard(rank, mesh)])
        if rank // 2 == lacking:
            model[0].grad = None
        reducer = NormReducer(model)
        spreads = [reducer.clip_(model, math.inf).replica_spread for _ in range(2)]
        return spreads, len(lines)

    for rank, (spreads, num_lines) in enumerate(run_ranks(rank_main, 4)):
        assert spreads == ([0.0, 0.0] if rank // 2 == lacking else [1.0, 1.0])
        assert num_lines == (1 if rank == 2 * (1 - lacking) else 0)


def test_stages_and_other_meshes_raise_no_false_alarm():
    """PP 2 x FSDP 2 differs between stages, even where a stage shares its lane with a replica."""

    def rank_main(rank):
        lines = caught_warnings()
        mesh = mesh_of("gloo", (2, 2), ("pp", "fsdp"))
        stage = rank // 2
        own = parameter(torch.full((4,), 1.0 + stage), mesh["fsdp"], [Shard(0)])
        tied = shard(rank, mesh)
        pp = mesh.get_group("pp")
        spreads = [
            NormReducer(pp_group=group).clip_(params, math.inf).replica_spread
            for group in (pp, None)
            for params in ([own], [own, tied], [tied])
        ]
        return spreads, lines

    assert run_ranks(rank_main, 4) == [([0.0] * 6, [])] * 4


def test_tensor_parallel_norm_weights_and_partial_gradients_are_compared():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("fsdp", "tp"))
        weight = parameter(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        norm_weight = parameter_of_shard(
            torch.tensor([2.0 + rank % 2]), mesh, [Shard(0), Replicate()]
        )
        first = NormReducer().clip_([weight, norm_weight], math.inf).replica_spread
        summed = parameter_of_shard(torch.tensor([2.0 + rank % 2]), mesh, [Partial(), Replicate()])
        return first, NormReducer().clip_([summed], math.inf).replica_spread

    assert run_ranks(rank_main, 4) == [(pytest.approx(1 / 3), pytest.approx(1 / 3))] * 4
