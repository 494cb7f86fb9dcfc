"""Lists of parameters that break off while they are read, on one rank."""

import math

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import clip_grad_norm_, get_total_norm
from tests.ranks import RankFailedError, run_ranks
from tests.sharding import dense


@pytest.mark.parametrize("how", ["group", "dtensor-seen", "nothing-seen"])
def test_iterable_that_raises_on_one_rank_is_raised_by_all(how):
    def rank_main(rank):
        param = dense("gloo")

        def listing():
            if how != "nothing-seen":
                yield param
            if rank == 1:
                raise KeyError("listing broke")
            yield param

        group = dist.group.WORLD if how == "group" else None
        norm = clip_grad_norm_([param], math.inf).item()
        with pytest.raises(RuntimeError, match="rank 1: KeyError: 'listing broke'"):
            clip_grad_norm_(listing(), 1.0, group=group)
        assert clip_grad_norm_([param], math.inf).item() == norm

    run_ranks(rank_main, 4)


def test_iterable_that_raises_where_nobody_else_is_raises_its_own_error():
    def listing():
        yield from ()
        raise KeyError("listing broke")

    with pytest.raises(KeyError, match="listing broke"):
        clip_grad_norm_(listing(), 1.0)
    with pytest.raises(KeyError, match="listing broke"):
        get_total_norm(listing())


def test_iterable_of_plain_tensors_that_raises_on_one_rank_leaves_nobody_waiting():
    def rank_main(rank):
        def listing():
            if rank == 1:
                raise KeyError("listing broke")
            yield torch.nn.Parameter(torch.ones(2))

        clip_grad_norm_(listing(), 1.0)

    with pytest.raises(RankFailedError, match="KeyError: 'listing broke'") as caught:
        run_ranks(rank_main, 2, timeout_s=10)
    assert "rank 0" not in str(caught.value)
