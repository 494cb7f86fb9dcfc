"""Agreement: every rank builds the same sorted layout from what each of them knows."""

import pytest
import torch.distributed as dist

from hyper_parallel.platform.torch import agreement
from hyper_parallel.platform.torch.lanes import Statement, describe_ranks
from hyper_parallel.platform.torch.reduction_groups import resolve_group
from tests.ranks import run_ranks
from tests.sharding import both


def agree(group, rank_sets):
    return agreement.agree(group, Statement(rank_sets))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "none"),
        ([3], "3"),
        (range(128), "0-127"),
        ([8, 0, 1, 2, 10], "0-2, 8, 10"),
        ([5, 4], "4-5"),
    ],
)
def test_ranks_are_described_in_few_words(ranks, text):
    assert describe_ranks(ranks) == text


@both
def test_layout_is_the_union_sorted_and_equal_everywhere(backend):
    """Overlapping, not nested rank sets; rank 3 knows none."""
    known = {
        0: [(0, 1, 2, 3), (0, 1)],
        1: [(0, 1), (1, 2)],
        2: [(1, 2), (0, 1, 2, 3)],
        3: [],
    }

    def rank_main(rank):
        group = resolve_group(None)
        layout = agree(group, known[rank])
        assert group.layout == layout
        return layout

    layouts = run_ranks(rank_main, 4, backend=backend)
    lanes = {(0, 1): 0, (0, 1, 2, 3): 1, (1, 2): 2}
    for rank, layout in enumerate(layouts):
        assert layout.lane_of == lanes
        assert list(layout.lane_of) == sorted(lanes)
        assert layout.own_rank_sets == tuple(s for s in sorted(lanes) if rank in s)


def test_layouts_grow_and_cost_one_small_exchange_where_nothing_is_new():
    def rank_main(rank):
        group = resolve_group(None)
        costs = []
        for mine in ([(0, 1)], [(0, 1)], [(0, 2)] if rank != 1 else [], [(0, 1)]):
            before = group.copies.collectives
            layout = agree(group, mine)
            costs.append(group.copies.collectives - before)
        return costs, layout.lane_of

    for costs, lane_of in run_ranks(rank_main, 3):
        assert costs == [3, 1, 3, 1]
        assert lane_of == {(0, 1): 0, (0, 2): 1}


def test_layouts_belong_to_their_group():
    def rank_main(rank):
        half = dist.new_group([0, 1])
        world = resolve_group(None)
        agree(world, [(0, 1, 2)])
        if rank < 2:
            agree(resolve_group(half), [(0, 1)])
            assert resolve_group(half).layout.lane_of == {(0, 1): 0}
        return resolve_group(None).layout.lane_of

    assert run_ranks(rank_main, 3) == [{(0, 1, 2): 0}] * 3


def test_rank_sets_outside_the_group_are_refused_on_every_rank_of_it():
    def rank_main(rank):
        half = dist.new_group([0, 1])
        if rank == 2:
            return None
        group = resolve_group(half)
        with pytest.raises(ValueError, match="ranks 2, which are not in the group"):
            agree(group, [(0, 1, 2)] if rank == 0 else [])
        assert group.layout is None
        return True

    assert run_ranks(rank_main, 3) == [True, True, None]


def test_a_large_rank_set_is_announced_by_hash_and_sent_once():
    """Every rank knows it; the members cross the wire once, not once per rank."""

    def rank_main(rank):
        group = resolve_group(None)
        sent = []
        gather, add = group.gather_ints, group.sum_ints
        group.gather_ints = lambda values: sent.append(len(values)) or gather(values)
        group.sum_ints = lambda values: sent.append(sum(map(bool, values))) or add(values)
        agree(group, [(0, 1, 2, 3)])
        return sent

    sent = run_ranks(rank_main, 4)
    assert sent == [[2, 3], [2, 0], [2, 0], [2, 0]]
