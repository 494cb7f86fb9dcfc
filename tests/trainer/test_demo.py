import dataclasses
import math

import pytest

from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.trainer.demo import OffloadedRun, build_report, find_difference
from hyper_parallel.trainer.train import HostBytes, StepRecord

ONE_EACH = Copies(h2d=1, collectives=1, d2h=1, host_syncs=1)


def records(num_steps: int) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            loss=5.0 - step / 8,
            grad_norm=1.0 + step,
            clip_coef=0.5 / step,
            tokens_per_s=100.0 * step,
            clip_cost=ONE_EACH,
        )
        for step in range(1, num_steps + 1)
    ]


def all_ranks(num_steps: int) -> list[list[StepRecord]]:
    return [records(num_steps), records(num_steps)]


def change_rank_1_step_2(runs: list[list[StepRecord]], **changes: float | Copies) -> None:
    runs[1][1] = dataclasses.replace(runs[1][1], **changes)


def offloaded(runs: list[list[StepRecord]]) -> list[OffloadedRun]:
    return [OffloadedRun(run, "no backend") for run in runs]


def test_equal_runs_have_no_difference_whatever_their_speed():
    resident = all_ranks(2)
    change_rank_1_step_2(resident, tokens_per_s=1.0)
    assert find_difference(all_ranks(4), resident) is None


@pytest.mark.parametrize("side", ["offloaded", "resident"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", math.nextafter(4.75, 5)),
        ("loss", math.nan),
        ("grad_norm", math.nextafter(3.0, 4)),
        ("clip_coef", 1.0),
        ("clip_coef", math.nan),
    ],
)
def test_smallest_difference_on_one_rank_is_found(side, field, value):
    runs = {"offloaded": all_ranks(4), "resident": all_ranks(3)}
    change_rank_1_step_2(runs[side], **{field: value})
    assert find_difference(runs["offloaded"], runs["resident"]).startswith("rank 1 step 2: ")


def test_equal_but_unclipped_runs_count_as_different():
    host, device = all_ranks(3), all_ranks(3)
    for runs in (host, device):
        change_rank_1_step_2(runs, clip_coef=1.0)
    assert "not clipped" in find_difference(host, device)


@pytest.mark.parametrize(
    ("host", "device"),
    [(all_ranks(3), [records(3)]), (all_ranks(2), all_ranks(3)), (all_ranks(3), [[], []])],
    ids=["missing-rank", "missing-steps", "no-steps"],
)
def test_runs_that_cannot_be_compared_count_as_different(host, device):
    assert find_difference(host, device) is not None


def test_report_of_a_good_run_has_no_problems():
    report = build_report(offloaded(all_ranks(4)), all_ranks(2))
    assert report.problems == []
    assert report.values == {
        "ranks": 2,
        "steps": 4,
        "loss_first": 4.875,
        "loss_last": 4.5,
        "clip": dataclasses.asdict(ONE_EACH) | dataclasses.asdict(HostBytes()),
        "offload_equals_resident": True,
        "torch_clip_error": "no backend",
    }


def test_report_shows_counters_that_disagree():
    runs = all_ranks(4)
    change_rank_1_step_2(runs, clip_cost=dataclasses.replace(ONE_EACH, h2d=3))
    report = build_report(offloaded(runs), all_ranks(2))
    expected = dataclasses.asdict(ONE_EACH) | {"h2d": [1, 3]} | dataclasses.asdict(HostBytes())
    assert report.values["clip"] == expected
    assert any("h2d [1, 3]" in problem for problem in report.problems)


def test_report_shows_the_most_bytes_that_a_clip_touched():
    runs = all_ranks(4)
    change_rank_1_step_2(runs, clip_bytes=HostBytes(4096, 512, 64))
    report = build_report(offloaded(runs), all_ranks(2))
    assert report.problems == []
    clip = report.values["clip"]
    assert (clip["host_bytes_read"], clip["host_bytes_written"]) == (4096, 512)
    assert clip["sampled_bytes_read"] == 64


def test_ranks_that_disagree_on_the_norm_are_a_problem():
    runs = all_ranks(4)
    change_rank_1_step_2(runs, grad_norm=math.nextafter(3.0, 4))
    report = build_report(offloaded(runs), [run[:3] for run in runs])
    assert report.problems == ["ranks disagree on loss or norm in step 2"]


def test_report_shows_a_difference():
    resident = all_ranks(2)
    change_rank_1_step_2(resident, loss=4.0)
    report = build_report(offloaded(all_ranks(4)), resident)
    assert report.values["offload_equals_resident"] is False
    assert any("rank 1 step 2" in problem for problem in report.problems)


def test_loss_that_does_not_fall_is_a_problem():
    runs = all_ranks(4)
    for run in runs:
        run[-1] = dataclasses.replace(run[-1], loss=4.875)
    report = build_report(offloaded(runs), all_ranks(2))
    assert any("did not fall" in problem for problem in report.problems)


def test_torch_errors_that_disagree_are_all_shown():
    runs = [OffloadedRun(records(4), "one"), OffloadedRun(records(4), None)]
    assert build_report(runs, all_ranks(2)).values["torch_clip_error"] == ["one", None]
