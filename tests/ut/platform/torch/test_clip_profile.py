"""A profiler's trace shows the six steps of a clip, and nothing is left open by one that fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hyper_parallel import clip_grad_norm_

STEPS = ("collect", "measure", "pack", "reduce", "finish", "scale")


def parameter() -> torch.nn.Parameter:
    result = torch.nn.Parameter(torch.zeros(3))
    result.grad = torch.ones(3)
    return result


def ranges_of(profiler: profile) -> list[tuple[float, float, str]]:
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.name.startswith(("hyper_parallel::", "after"))
    )


def test_trace_shows_six_steps_one_after_the_other():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        clip_grad_norm_([parameter()], 1.0)
    ranges = ranges_of(profiler)
    assert [name for _, _, name in ranges] == [f"hyper_parallel::{step}" for step in STEPS]
    assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("max_norm", [-1.0, 1.0], ids=["bad request", "nonfinite"])
def test_range_of_a_clip_that_raises_ends_with_it(max_norm):
    param = parameter()
    param.grad.fill_(float("nan"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            clip_grad_norm_([param], max_norm, error_if_nonfinite=True)
        with record_function("after"):
            pass
    assert raised.value.__traceback__ is not None  # it still holds the frames of the clip
    *steps, after = ranges_of(profiler)
    assert steps[-1][2] == "hyper_parallel::reduce"
    assert after[2] == "after"
    assert all(end <= after[0] for _, end, _ in steps)


def test_without_a_profiler_no_range_is_made(monkeypatch):
    monkeypatch.setattr("hyper_parallel.platform.torch.clip_result.record_function", None)
    assert float(clip_grad_norm_([parameter()], 1.0)) == pytest.approx(3**0.5)
