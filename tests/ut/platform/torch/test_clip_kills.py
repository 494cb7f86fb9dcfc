"""Ranks that are killed, hang, come late or break in a collective, after the first clip.

The others get an error that names them; a gradient is scaled whole or not at all.
"""

import math
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import clip_grad_norm_
from hyper_parallel.platform.torch import meeting, reduction_groups, staging_buffer
from tests.ranks import run_ranks
from tests.sharding import both, dense, expert, local_grad

VICTIM = 1
SURVIVORS = (0, 2, 3)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def clip(params, max_norm=1.0):
    """Clip; return the norm or the error's message. The gradients are all scaled, or none is."""
    before = [local_grad(param).clone() for param in params]
    try:
        norm = clip_grad_norm_(params, max_norm)
    except RuntimeError as error:
        for param, grad in zip(params, before, strict=True):
            assert torch.equal(local_grad(param), grad)
        return str(error)
    coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for param, grad in zip(params, before, strict=True):
        assert torch.equal(local_grad(param), grad * coef)
    return norm.item()


def ranks_named_in(message):
    """Return the ranks that, as an error says, did not report."""
    named = re.search(r"rank\(s\) ([\d, -]+) reported no failure", message)
    assert named, message
    ranks = set()
    for run in named[1].split(", "):
        first, _, last = run.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def kill_before_the_reduce(params):
    def listing():
        yield from params
        die()

    clip_grad_norm_(listing(), 1.0)


def kill_during_the_reduce(params):
    all_reduce = dist.all_reduce

    def start_and_die(*args, **options):
        works.append(all_reduce(*args, **options, async_op=True))
        die()

    works = []
    dist.all_reduce = start_and_die
    clip_grad_norm_(params, 1.0)


def kill_after_the_reduce(params):
    reduce = staging_buffer.StagingBuffer.reduce

    def finish_and_die(*args):
        reduce(*args)
        die()

    staging_buffer.StagingBuffer.reduce = finish_and_die
    clip_grad_norm_(params, 1.0)


KILLS = {
    "before": kill_before_the_reduce,
    "during": kill_during_the_reduce,
    "after": kill_after_the_reduce,
}


@both
@pytest.mark.parametrize("moment", KILLS)
def test_killed_rank_is_named_to_the_others_and_no_gradient_is_half_scaled(backend, moment):
    """Those that waited for it find out at once, the others at the group's timeout."""

    def rank_main(rank):
        meeting._patience = meeting.timedelta(seconds=1)
        params = [dense(backend), expert(backend)]
        expected = clip(params, math.inf)
        if rank == VICTIM:
            KILLS[moment](params)
        # A rank that had finished before the other died finds out at the next clip.
        outcomes = [clip(params)]
        if not isinstance(outcomes[0], str):
            assert outcomes[0] == expected
            outcomes.append(clip(params, 0.5))
        return outcomes

    results = run_ranks(
        rank_main, 4, backend=backend, victims=[VICTIM], timeout_s=20, group_timeout_s=3
    )
    for rank in SURVIVORS:
        message = results[rank][-1]
        assert f"rank {rank}: the reduction of the gradient norm failed" in message
        assert "no gradient was changed on this rank" in message
        if moment == "before":
            assert len(results[rank]) == 1
    named = [ranks_named_in(results[rank][-1]) for rank in SURVIVORS]
    assert all(VICTIM in ranks for ranks in named)
    assert {VICTIM} in named  # to the last that finds out, at least


@both
def test_rank_killed_while_all_give_account_of_an_error(backend):
    def rank_main(rank):
        meeting._patience = meeting.timedelta(seconds=1)
        params = [dense(backend), expert(backend)]
        clip(params, math.inf)
        if rank == VICTIM:
            reduction_groups.all_gather_rows = lambda *args: die()
        local_grad(params[0]).fill_(math.nan)
        with pytest.raises(RuntimeError) as raised:
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        assert local_grad(params[0]).isnan().all()
        assert local_grad(params[1]).isfinite().all()
        return ranks_named_in(str(raised.value))

    results = run_ranks(
        rank_main, 4, backend=backend, victims=[VICTIM], timeout_s=20, group_timeout_s=3
    )
    assert {VICTIM} in results


def test_rank_killed_before_the_first_clip_is_named_at_the_groups_timeout():
    def rank_main(rank):
        if rank == VICTIM:
            die()
        return clip([dense("gloo")])

    results = run_ranks(rank_main, 4, victims=[VICTIM], timeout_s=15, group_timeout_s=2)
    for rank in SURVIVORS:
        assert "rank(s) 1 did not come" in results[rank]


@both
def test_rank_that_leaves_out_a_clip_is_named(backend):
    def rank_main(rank):
        meeting._patience = meeting.timedelta(seconds=1)
        params = [dense(backend), expert(backend)]
        clip(params, math.inf)
        return None if rank == VICTIM else ranks_named_in(clip(params))

    results = run_ranks(rank_main, 4, backend=backend, group_timeout_s=3, timeout_s=30)
    assert {VICTIM} in results


@both
def test_rank_that_breaks_inside_the_reduce_is_named_with_its_reason(backend, tmp_path):
    """And in groups made anew all clip again."""

    def rank_main(rank):
        meeting._patience = meeting.timedelta(seconds=1)
        params = [dense(backend), expert(backend)]
        expected = clip(params, math.inf)
        works = staging_buffer.StagingBuffer.reduce
        if rank == VICTIM:

            def fail(*args):
                raise MemoryError("no room for a copy")

            staging_buffer.StagingBuffer.reduce = fail
        message = clip(params)
        staging_buffer.StagingBuffer.reduce = works
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "again"), 4)
        dist.init_process_group(backend, store=store, rank=rank, world_size=4)
        assert clip([dense(backend), expert(backend)]) == expected
        return message

    messages = run_ranks(rank_main, 4, backend=backend, group_timeout_s=3, timeout_s=30)
    assert "no room for a copy" in messages[VICTIM]
    for rank in SURVIVORS:
        assert f"the first to fail was rank {VICTIM}: MemoryError: no room" in messages[rank]


@both
def test_rank_that_comes_three_seconds_late_is_waited_for(backend):
    def rank_main(rank):
        params = [dense(backend), expert(backend)]
        expected = clip(params, math.inf)
        if rank == VICTIM:
            time.sleep(3)
        return clip(params) == expected

    assert run_ranks(rank_main, 4, backend=backend) == [True] * 4
