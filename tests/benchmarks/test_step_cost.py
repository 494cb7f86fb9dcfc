"""The benchmark runs and tells the bytes of every way to clip; no time is asserted."""

import json

import pytest

from tests.commands import output_of


@pytest.mark.simnpu
def test_small_run_reports_the_bytes_of_every_way(tmp_path):
    file = tmp_path / "rows.json"
    options = ["--numel", "4096", "--layers", "4", "--rounds", "2", "--json"]
    outcome = output_of("benchmarks/step_cost.py", *options, file)
    report = json.loads(file.read_text())
    assert {"cpu", "cpus", "torch", "commit", "load_average"} <= report["conditions"].keys()
    one_pass = 4 * report["conditions"]["numel"]
    touched = {
        row["way"]: (row["host_bytes_read"], row["host_bytes_written"]) for row in report["rows"]
    }
    assert touched == {
        "no clip": (0, 0),
        "norm before offload, clip in the step": (0, 0),
        "norm by a host pass, clip in the step": (one_pass, 0),
        "norm by a host pass, scaled by another": (2 * one_pass, one_pass),
    }
    for row in report["rows"]:
        assert row["added_percent_low"] <= row["added_percent"] <= row["added_percent_high"]
        assert (row["sampled_bytes_read"] > 0) == row["way"].startswith("norm before offload")
    assert len(outcome.stdout.splitlines()) == 4
