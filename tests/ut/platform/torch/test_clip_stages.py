"""Pipeline stages: different parameters on the ranks of `pp_group`, in the one all-reduce."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from hyper_parallel.platform.torch.clip_result import Copies
from tests.clipping import error_of
from tests.ranks import run_ranks
from tests.reference import assert_rounds_sqrt, exact_pow_sum
from tests.sharding import both, local_grad, mesh_of, parameter, parameter_of_shard


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ones_of(backend):
    """The counts that a clip after the first may cost."""
    return Copies(1, 1, 1, 1) if backend == "hccl" else Copies(0, 1, 0, 0)


@both
@pytest.mark.parametrize(("p", "norm"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0), (-math.inf, 3.0)])
def test_two_stages_of_plain_tensors(backend, p, norm):
    """torchtitan#596, torchtitan#649."""

    def rank_main(rank):
        pp = mesh_of(backend, (2,), ("pp",)).get_group()
        param = parameter(torch.tensor([3.0 + rank]))
        found = clip_grad_norm_([param], 1.0, p, pp_group=pp).item()
        return found, round(param.grad.item(), 5)

    results = run_ranks(rank_main, 2, backend=backend)
    assert results == [(norm, round(3 / norm, 5)), (norm, round(4 / norm, 5))]


@both
def test_stages_of_fsdp_and_tp(backend):
    """PP 2 x TP 2 x FSDP 2; weights over both, norm weights over FSDP, a plain tensor each."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2, 2), ("pp", "fsdp", "tp"))
        stage = mesh.get_local_rank("pp")
        inner = mesh["fsdp", "tp"]
        grads = [values(10 * stage, 8, 4), values(10 * stage + 1, 6), values(10 * stage + 2, 3)]
        params = [
            parameter(grads[0], inner, [Shard(0), Shard(1)]),
            parameter(grads[1], inner, [Shard(0), Replicate()]),
            parameter(grads[2]),
        ]
        reducer = NormReducer(torch.nn.ParameterList(params), pp_group=mesh.get_group("pp"))
        results = [reducer.clip_(params, math.inf, p) for p in (2.0, 2.0, math.inf)]
        assert [result.copies for result in results] == [ones_of(backend)] * 3
        assert all(result.replica_spread == 0 for result in results)
        return [result.total_norm for result in results]

    grads = [
        values(10 * stage + i, *shape)
        for stage in range(2)
        for i, shape in enumerate([(8, 4), (6,), (3,)])
    ]
    for two, again, largest in run_ranks(rank_main, 8, backend=backend):
        assert_rounds_sqrt(two, exact_pow_sum(grads))
        assert two == again
        assert largest == max(grad.abs().max() for grad in grads)


def test_replicas_inside_stages_count_once():
    """PP 2 x HSDP 2 x 2: a rank adds the lanes of its own pp peers, not those of their replicas."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2, 2), ("pp", "replicate", "shard"))
        stage = mesh.get_local_rank("pp")
        param = parameter(values(stage, 8), mesh["replicate", "shard"], [Replicate(), Shard(0)])
        norm = clip_grad_norm_([param], math.inf, pp_group=mesh.get_group("pp"))
        assert norm.dtype == torch.float32
        return norm

    for norm in run_ranks(rank_main, 8):
        assert_rounds_sqrt(norm, exact_pow_sum([values(0, 8), values(1, 8)]))


def test_stage_without_gradients_and_uneven_stages():
    def rank_main(rank):
        mesh = mesh_of("gloo", (3, 2), ("pp", "fsdp"))
        stage = mesh.get_local_rank("pp")
        params = [
            parameter(values(7 * stage + i, 5), mesh["fsdp"], [Shard(0)]) for i in range(2 * stage)
        ]
        reducer = NormReducer(pp_group=mesh.get_group("pp"))
        first = reducer.clip_(params, math.inf)
        second = reducer.clip_(params if stage != 1 else [], math.inf)
        assert second.copies.collectives == 1
        return first.total_norm, second.total_norm

    stages = [[], [values(7 + i, 5) for i in range(2)], [values(14 + i, 5) for i in range(4)]]
    for first, second in run_ranks(rank_main, 6):
        assert_rounds_sqrt(first, exact_pow_sum(stages[1] + stages[2]))
        assert_rounds_sqrt(second, exact_pow_sum(stages[2]))


def test_one_stage_is_as_no_stages():
    """The pp group of every rank is itself."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (1, 2), ("pp", "fsdp"))
        params = [parameter(values(0, 8), mesh["fsdp"], [Shard(0)]), parameter(values(1, 3))]
        pp = mesh.get_group("pp")
        result = NormReducer(pp_group=pp).clip_(params, math.inf)
        assert set(result.norms_by_rank_set) == {(0, 1), ()}
        assert clip_grad_norm_([params[1]], math.inf, pp_group=pp) == get_total_norm(
            [params[1].grad]
        )
        return result.total_norm, clip_grad_norm_(params, math.inf)

    for norm, without in run_ranks(rank_main, 2):
        assert norm == without
        assert_rounds_sqrt(norm, exact_pow_sum([values(0, 8), values(1, 3)]))


def test_one_rank_in_all_needs_no_group():
    def rank_main(rank):
        return clip_grad_norm_([parameter(torch.tensor([3.0]))], 1.0, pp_group=dist.group.WORLD)

    assert run_ranks(rank_main, 1) == [3.0]


@both
def test_group_that_does_not_cover_the_stages_is_refused_by_all_its_ranks(backend):
    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("pp", "fsdp"))
        param = parameter(values(0, 8), mesh["fsdp"], [Shard(0)])
        pp, stage = mesh.get_group("pp"), mesh.get_group("fsdp")
        message = str(error_of([param], 1.0, group=stage, pp_group=pp))
        assert clip_grad_norm_([param], math.inf, group=stage) > 0  # and the next clip works
        return message

    for rank, message in enumerate(run_ranks(rank_main, 4, backend=backend)):
        outside, group = (2, "0-1") if rank < 2 else (0, "2-3")
        assert f"pp_group of ranks 0, 2 has ranks {outside}, which are not" in message
        assert f"reduced over ({group})" in message


def test_group_of_one_rank_does_not_cover_stages():
    def rank_main(rank):
        groups = [dist.new_group([0]), dist.new_group([1])]
        error = error_of(
            [parameter(torch.ones(1))], 1.0, group=groups[rank], pp_group=dist.group.WORLD
        )
        return str(error)

    for message in run_ranks(rank_main, 2):
        assert "pp_group" in message


DISAGREEMENTS = {
    "one-passes-none": lambda rank, groups: None if rank == 3 else groups["columns"],
    "all-but-one-pass-none": lambda rank, groups: groups["columns"] if rank == 3 else None,
    "rows-and-columns": lambda rank, groups: groups["rows" if rank == 1 else "columns"],
    "too-large": lambda rank, groups: groups["all"] if rank == 2 else groups["columns"],
}


def disagree(rank, mesh, kinds):
    """Disagree in each of these ways, then clip as one should."""
    groups = {
        "columns": mesh.get_group("pp"),
        "rows": mesh.get_group("fsdp"),
        "all": dist.group.WORLD,
    }
    param = parameter(values(rank // 2, 8), mesh["fsdp"], [Shard(0)])
    messages = []
    for kind in kinds:
        error = error_of([param], 1.0, pp_group=DISAGREEMENTS[kind](rank, groups))
        assert isinstance(error, ValueError)
        messages.append(str(error))
        norm = clip_grad_norm_([param], math.inf, pp_group=groups["columns"])
        assert_rounds_sqrt(norm, exact_pow_sum([values(0, 8), values(1, 8)]))
        for group in groups.values():  # each of them is agreed on by itself
            clip_grad_norm_([param], math.inf, pp_group=group)
    return messages


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_on_the_stages_at_first_are_told_alike(kind):
    def rank_main(rank):
        return disagree(rank, mesh_of("gloo", (2, 2), ("pp", "fsdp")), [kind])

    messages = run_ranks(rank_main, 4)
    assert messages == [messages[0]] * 4
    assert "pp_group" in messages[0][0]


@both
def test_ranks_that_disagree_on_the_stages_later_are_told_alike(backend):
    """Though each of the groups has been agreed on before."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("pp", "fsdp"))
        return disagree(rank, mesh, [*DISAGREEMENTS, *DISAGREEMENTS])

    messages = run_ranks(rank_main, 4, backend=backend)
    assert messages == [messages[0]] * 4
    assert all("pp_group" in message for message in messages[0])


def test_group_that_lacks_this_rank_is_raised_by_all():
    def rank_main(rank):
        mine, other = [dist.new_group([0, 1]), dist.new_group([2, 3])][:: 1 if rank < 2 else -1]
        param = parameter(torch.ones(1))
        return str(error_of([param], 1.0, pp_group=other if rank == 3 else mine))

    messages = run_ranks(rank_main, 4)
    assert len(set(messages)) == 1
    assert (
        "rank 3: ValueError: rank 3 is not in a group that it was given in pp_group" in messages[0]
    )


def test_reducer_refuses_a_bad_group_on_all_ranks():
    def rank_main(rank):
        groups = [dist.new_group([0]), dist.new_group([1])]
        with pytest.raises(ValueError, match=r"rank 1: .*not in a group .* in pp_group"):
            NormReducer(torch.nn.Linear(1, 1), pp_group=groups[0])

    run_ranks(rank_main, 2)


@both
def test_models_with_different_stages_take_turns(backend):
    """PP 2 x FSDP 2 and FSDP 2 x PP 2 and no PP: each costs one reduce once it is known."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2), ("a", "b"))
        turns = []
        for pp, fsdp in (("a", "b"), ("b", "a"), (None, "b")):
            seed = mesh.get_local_rank(pp) if pp else 5
            params = [parameter(values(seed, 8), mesh[fsdp], [Shard(0)]), parameter(values(9, 2))]
            turns.append((params, NormReducer(pp_group=mesh.get_group(pp) if pp else None)))
        norms, costs = [], []
        for _ in range(3):
            for params, reducer in turns:
                result = reducer.clip_(params, math.inf)
                norms.append(result.total_norm)
                costs.append(result.copies)
        assert norms[3:6] == norms[:3]
        assert norms[6:] == norms[:3]
        assert costs[3:] == [ones_of(backend)] * 6
        return norms[:3]

    twice = exact_pow_sum([values(9, 2)]) * 2
    staged = exact_pow_sum([values(0, 8), values(1, 8)]) + twice
    for first, second, alone in run_ranks(rank_main, 4, backend=backend):
        assert_rounds_sqrt(first, staged)
        assert_rounds_sqrt(second, staged)
        assert_rounds_sqrt(alone, exact_pow_sum([values(5, 8), values(9, 2)]))


@both
def test_pp_groups_that_two_pipelines_share_do_not_hide_which_is_meant(backend):
    """Ranks 0 and 1 pass the same group both times, ranks 2 and 3 another one."""

    def rank_main(rank):
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        alone = [dist.new_group([r]) for r in range(4)][rank]
        param = parameter(torch.tensor([3.0 + rank % 2]))
        norms = []
        for _ in range(3):
            norms.append(clip_grad_norm_([param], math.inf, pp_group=pair).item())
            second = pair if rank < 2 else alone
            norms.append(clip_grad_norm_([param], math.inf, pp_group=second).item())
        return norms

    results = run_ranks(rank_main, 4, backend=backend)
    assert results == [[5.0] * 6, [5.0] * 6, [5.0, 3.0] * 3, [5.0, 4.0] * 3]


def test_nan_on_one_stage_is_named_on_all():
    def rank_main(rank):
        param = parameter(torch.tensor([math.nan if rank else 1.0]))
        pp = dist.group.WORLD
        assert clip_grad_norm_([param], math.inf, pp_group=pp).isnan()
        return str(error_of_nan(param, pp))

    def error_of_nan(param, pp):
        with pytest.raises(RuntimeError) as raised:
            clip_grad_norm_([param], 1.0, error_if_nonfinite=True, pp_group=pp)
        return raised.value

    messages = run_ranks(rank_main, 2)
    assert len(set(messages)) == 1
    assert "rank 1: parameters[0] of shape (1,) (1 NaN, 0 inf)" in messages[0]


def test_partial_gradients_inside_stages():
    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("pp", "dp"))
        addend = values(rank, 6).round()
        param = parameter_of_shard(addend, mesh["dp"], [Partial()])
        return clip_grad_norm_([param], math.inf, pp_group=mesh.get_group("pp"))

    sums = [
        values(0, 6).round() + values(1, 6).round(),
        values(2, 6).round() + values(3, 6).round(),
    ]
    for norm in run_ranks(rank_main, 4):
        assert_rounds_sqrt(norm, exact_pow_sum(sums))


def test_replica_over_the_stages_by_its_own_mesh_counts_once():
    """The DTensor says that both stages hold it; other gradients of the stages share its lanes."""

    def rank_main(rank):
        mesh = mesh_of("gloo", (2, 2), ("pp", "fsdp"))
        tied = parameter(values(5, 8), mesh, [Replicate(), Shard(0)])
        whole = parameter(values(6, 3), mesh, [Replicate(), Replicate()])
        own = parameter(values(rank // 2, 8), mesh["fsdp"], [Shard(0)])
        pp = mesh.get_group("pp")
        alone = NormReducer(pp_group=pp).clip_([tied, whole], math.inf)
        assert alone.replica_spread == 0
        norm = clip_grad_norm_([tied, own, whole], 1.0, pp_group=pp)
        return norm, alone.total_norm, local_grad(tied)

    tied = exact_pow_sum([values(5, 8), values(6, 3)])
    results = run_ranks(rank_main, 4)
    for norm, alone, _ in results:
        assert_rounds_sqrt(norm, tied + exact_pow_sum([values(0, 8), values(1, 8)]))
        assert_rounds_sqrt(alone, tied)
    assert results[0][2].equal(results[2][2])
    assert results[0][2].norm() < values(5, 8)[:4].norm()
