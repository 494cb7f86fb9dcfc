"""What norms before the offload cost, what a whole step makes of them, and who goes without."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hyper_parallel import NormBeforeOffload, NormReducer
from hyper_parallel.testing import simnpu
from tests.early import Model, counts_of, num_groups, offloaded, train_once
from tests.ranks import run_ranks

pytestmark = pytest.mark.simnpu


def test_clip_costs_one_reduce_and_backward_one_asynchronous_copy_a_group():
    """The counters of the simulated NPU, with and without the hook."""

    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        reducer = NormReducer(model)
        early = NormBeforeOffload(model)
        backward, clips = {}, []
        for attached in (False, True, True):
            (early.attach if attached else early.detach)()
            for _ in range(2):  # of each the second: buffers are there
                model.zero_grad()
                simnpu.reset_counters()
                train_once(model, 1)
                backward[attached] = simnpu.counters()
                simnpu.reset_counters()
                result = reducer.clip_(model.parameters(), math.inf)
                counters = simnpu.counters()
            counts = counts_of(counters)
            assert counts == [
                result.copies.h2d,
                result.copies.collectives,
                result.copies.d2h,
                result.copies.host_syncs,
            ]
            assert counters["early_rewrites"] == 0
            clips.append((counts, result.host_bytes_read, counters["kernels"]))
        groups = num_groups(model)
        without, with_hook = backward[False], backward[True]
        assert with_hook["host_syncs"] == without["host_syncs"]
        assert with_hook["collectives"] == without["collectives"]
        assert with_hook["h2d"] == without["h2d"]
        assert with_hook["d2h"] == without["d2h"] + groups
        assert with_hook["d2h_async"] == without["d2h_async"] + groups
        # Of each shard: three fixed elements, bits and places of two telling ones; int32.
        sizes = [p.grad.to_local().numel() for p in model.parameters()]
        samples_bytes = sum(4 * (min(size, 3) + 4) for size in sizes if size)
        assert with_hook["d2h_bytes"] == without["d2h_bytes"] + samples_bytes
        assert with_hook["early_rewrites"] == 0
        one_pass = sum(p.grad.to_local().nbytes for p in model.parameters())
        assert [clip[:2] for clip in clips] == [
            ([1, 1, 1, 1], one_pass),
            ([0, 1, 1, 1], 0),
            ([0, 1, 1, 1], 0),
        ]
        return clips[2][2]

    kernels = run_ranks(rank_main, 2, backend="hccl")
    assert max(kernels) < 100  # whatever the number of gradients, see the next test


def test_launches_of_a_clip_do_not_grow_with_the_parameters():
    def rank_main(rank):
        counts = []
        for num_layers in (1, 12):
            torch.manual_seed(0)
            model = offloaded(nn.Sequential(*(nn.Linear(13, 13) for _ in range(num_layers))))
            NormBeforeOffload(model)
            reducer = NormReducer(model)
            for _ in range(2):
                model.zero_grad()
                train_once(model, 1)
                simnpu.reset_counters()
                result = reducer.clip_(model.parameters(), math.inf)
            assert result.num_early == 2 * num_layers
            counts.append(simnpu.counters()["kernels"])
        return counts

    for few, many in run_ranks(rank_main, 2, backend="hccl"):
        assert few == many


def train_five_steps(scaling, max_norm):
    """Return losses and parameters; `features` are early norms and scaling in the step."""
    torch.manual_seed(0)
    model = offloaded(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reducer = NormReducer(model)
    early = NormBeforeOffload(model) if scaling == "features" else None
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(6, 13, generator=generator).to("npu")).square().sum()
        loss.backward()
        if scaling == "divided by hand":
            norm = reducer.clip_(model.parameters(), math.inf).total_norm
            divisor = 1.0 / min(1.0, (max_norm / (norm + 1e-6)).item())
            for param in model.parameters():
                param.grad.to_local().div_(torch.tensor(divisor))
        else:
            with_optimizer = {"optimizer": optimizer} if early else {}
            result = reducer.clip_(model.parameters(), max_norm, **with_optimizer)
            assert (result.host_bytes_read + result.host_bytes_written == 0) == bool(early)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "not clipped"])
def test_five_steps_are_those_without_the_features(max_norm):
    """Equal bits where nothing is scaled, and else to those of divided gradients."""

    def rank_main(rank):
        usual = "divided by hand" if max_norm == 0.5 else "in place"
        ways = ("features", usual, "in place")
        return [train_five_steps(way, max_norm) for way in ways]

    for features, usual, in_place in run_ranks(rank_main, 2, backend="hccl"):
        assert features[0] == usual[0]
        assert all(map(torch.equal, features[1], usual[1]))
        assert features[0] == pytest.approx(in_place[0], rel=1e-5)
        assert features[0][-1] != features[0][0]


@pytest.mark.parametrize(
    ("options", "clip_options"),
    [({}, {"norm_type": 1.0}), ({}, {"norm_type": math.inf}), ({"reproducible": True}, {})],
    ids=["p=1", "p=inf", "reproducible"],
)
def test_other_norms_take_the_host_pass(options, clip_options):
    def rank_main(rank):
        torch.manual_seed(0)
        model = offloaded(Model())
        NormBeforeOffload(model)
        train_once(model, 1)
        return NormReducer(model, **options).clip_(model.parameters(), 1.0, **clip_options)

    for result in run_ranks(rank_main, 2, backend="hccl"):
        assert result.num_early == 0
        assert result.host_bytes_read > 0
