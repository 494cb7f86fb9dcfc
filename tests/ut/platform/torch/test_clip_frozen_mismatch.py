"""Ranks that ask a frozen `NormReducer(model)` for different clips, some through the host."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import simnpu
from tests.ranks import HOST_AND_NPU, run_ranks
from tests.sharding import Replicate, Shard, local_grad, mesh_of, parameter
from tests.ut.platform.torch.test_clip_frozen import Model, local_grads

pytestmark = [pytest.mark.simnpu, pytest.mark.triton]

# Of four. A hang would outlast it.
ODD_RANKS = [(1,), (0, 2, 3)]
TIMEOUT_S = 30

FROZEN = {
    "max_norm": {"max_norm": 2.0},
    "a float's last bit": {"max_norm": 1.0 + 2.0**-52},
    "measures only": {"max_norm": math.inf},
    "p = 1": {"norm_type": 1.0},
    "p = inf": {"norm_type": math.inf},
}
THROUGH_THE_HOST = {
    "error": {"error_if_nonfinite": True},
    "error, max": {"error_if_nonfinite": True, "norm_type": math.inf},
    "p = 3": {"norm_type": 3.0},
    "p = -inf": {"norm_type": -math.inf},
    "p = -3": {"norm_type": -3.0},
    "foreach": {"foreach": False},
    "skip": {"skip_nonfinite": True},  # wrong without an optimizer
}


def clip(
    reducer: hp.NormReducer, model: Model, *, raises: bool, **asked: Any
) -> hp.ClipResult | None:
    """Clip where ranks ask for different things: nothing changes, and nobody is left waiting."""
    before = local_grads(model)
    simnpu.reset_counters()
    result = None
    if raises:
        with pytest.raises(ValueError, match=r"must ask for the same clip.*without the host"):
            reducer.clip_(model.parameters(), **asked)
    else:
        result = reducer.clip_(model.parameters(), **asked)
        counters = simnpu.counters()
        assert (counters["d2h"], counters["host_syncs"]) == (0, 0)
        assert result.total_norm.isnan()
        assert result.local_norm.isnan()
        assert result.clip_coef.item() == 1.0
    assert simnpu.counters()["collectives"] == 1
    for old, new in zip(before, local_grads(model), strict=True):
        assert old.view(torch.uint8).equal(new.view(torch.uint8))
    return result


def ask_differently(
    rank: int,
    odd: tuple[int, ...],
    cases: list[dict[str, Any]],
    common: dict[str, Any],
    *,
    odd_ones_raise: bool,
) -> list[float]:
    model = Model()
    reducer = hp.NormReducer(model)
    norms = []
    for case in cases:
        own = case if rank in odd else {}
        clip(
            reducer,
            model,
            raises=odd_ones_raise and rank in odd,
            **{"max_norm": 1.0, **common, **own},
        )
        measured = reducer.clip_(model.parameters(), math.inf, **common)
        norms.append(measured.total_norm.item())
    return norms


def assert_next_norm_is_right(odd, cases, common, *, odd_ones_raise: bool) -> None:
    """After each case, on all ranks."""
    rows = run_ranks(
        functools.partial(ask_differently, odd_ones_raise=odd_ones_raise),
        4,
        odd,
        cases,
        common,
        backend=HOST_AND_NPU,
        timeout_s=TIMEOUT_S,
    )
    assert all(norm > 0 and norm == rows[0][0] for row in rows for norm in row)


@pytest.mark.parametrize("odd", ODD_RANKS)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_frozen_clips_that_differ_have_no_norm_and_change_nothing(norm_type, odd):
    common = {"norm_type": norm_type}
    cases = [case for case in FROZEN.values() if case != common]
    assert_next_norm_is_right(odd, cases, common, odd_ones_raise=False)


@pytest.mark.parametrize("odd", ODD_RANKS)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clips_through_the_host_among_frozen_ones_raise_and_change_nothing(norm_type, odd):
    common, cases = {"norm_type": norm_type}, [*THROUGH_THE_HOST.values()]
    assert_next_norm_is_right(odd, cases, common, odd_ones_raise=True)


def differ_in_the_reducer(rank: int) -> None:
    """One that is reproducible; one without a model; the function; an optimizer that scales."""
    model = Model()
    reducer = hp.NormReducer(model, reproducible=rank == 1)
    clip(reducer, model, raises=rank == 1, max_norm=1.0)
    reducer = hp.NormReducer(model)
    clip(hp.NormReducer() if rank == 2 else reducer, model, raises=rank == 2, max_norm=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    extra = {"optimizer": optimizer} if rank == 3 else {}
    clip(reducer, model, raises=rank == 3, max_norm=1.0, **extra)
    before = local_grads(model)
    if rank == 0:
        with pytest.raises(ValueError, match="must ask for the same clip"):
            hp.clip_grad_norm_(model.parameters(), 1.0)
    else:
        clip(reducer, model, raises=False, max_norm=1.0)
    assert all(map(torch.equal, local_grads(model), before))
    assert reducer.clip_(model.parameters(), 1.0).clip_coef.item() < 1.0


def test_other_ways_to_go_through_the_host_raise_too():
    run_ranks(differ_in_the_reducer, 4, backend=HOST_AND_NPU, timeout_s=TIMEOUT_S)


def nan_and_error(rank: int) -> None:
    """A rank that would gather who is not finite, and one that fails as well."""
    model = Model()
    reducer = hp.NormReducer(model)
    local_grad(model.weight0)[0] = math.nan
    clip(reducer, model, raises=rank == 0, max_norm=1.0, error_if_nonfinite=rank == 0)
    if rank == 0:
        with pytest.raises(ValueError, match=r"must ask for the same clip.*TypeError"):
            reducer.clip_([object()], 1.0, error_if_nonfinite=True)
    else:
        clip(reducer, model, raises=False, max_norm=1.0)


def test_rank_through_the_host_starts_no_gather_that_frozen_ones_would_not_join():
    run_ranks(nan_and_error, 4, backend=HOST_AND_NPU, timeout_s=TIMEOUT_S)


def grown_layout(rank: int) -> None:
    model = Model()
    reducer = hp.NormReducer(model)
    first = reducer.clip_(model.parameters(), math.inf)
    mesh = mesh_of("hccl", (2, 2), ("a", "b"))
    hp.NormReducer().clip_([parameter(torch.ones(8), mesh, [Shard(0), Replicate()])], 1.0)
    clip(reducer, model, raises=rank == 1, max_norm=1.0, error_if_nonfinite=rank == 1)
    simnpu.reset_counters()
    second = reducer.clip_(model.parameters(), math.inf)
    counters = simnpu.counters()
    assert (counters["d2h"], counters["host_syncs"], counters["collectives"]) == (0, 0, 1)
    assert second.total_norm.item() == first.total_norm.item() > 0
    assert second.norms_by_rank_set.keys() == first.norms_by_rank_set.keys()


def test_buffers_are_of_one_size_after_the_groups_layout_has_grown():
    run_ranks(grown_layout, 4, backend=HOST_AND_NPU, timeout_s=TIMEOUT_S)
