"""The clip benchmark counts and checks what it shows, and shows what fails; no time is asserted."""

import json
import os
import sys
import time

import pytest
import torch.distributed as dist
from clip_layouts import LAYOUT_NAMES, load_layout
from clip_rows import Row, build_row, row_from_json
from clip_session import Outcome, Sample
from pass_probe import Seen
from peers import METHODS
from rank_launcher import RankFailedError, run_ranks
from shard_sizes import kimi_k2_shards

from tests.commands import output_of

STEPS = {"collect", "measure", "pack", "reduce", "finish", "scale"}
pytestmark = pytest.mark.simnpu


def run(*options, methods=("hyper_parallel", "scalar_hop")):
    script = "benchmarks/clip_latency.py"
    return output_of(script, *options, "--methods", *methods, "--repeats", "2").stdout


def rows_of(file):
    return {row["method"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.parametrize(
    ("layout", "ranks", "hops"),
    [("tp2_ep2", 4, 7), ("multi_component", 4, 10), ("kimi_k2", 2, 2)],
)
def test_ours_costs_one_of_each_and_scalar_hop_one_per_bucket_and_dim(
    tmp_path, layout, ranks, hops
):
    file = tmp_path / "rows.json"
    table = run("--layout", layout, "--ranks", str(ranks), "--scale", "0.0001", "--json", str(file))
    rows = rows_of(file)
    counts = {
        method: [row[name] for name in ("h2d", "collectives", "d2h", "host_syncs")]
        for method, row in rows.items()
    }
    assert counts == {
        "hyper_parallel": [1, 1, 1, 1],
        "scalar_hop": [hops, hops, hops, 2 * hops],  # a copy up that is waited for, a copy down
    }
    assert load_layout(layout).num_hops(ranks) == hops
    for row in rows.values():
        assert row["supported"]
        assert not row["wrong"]
        assert row["rel_error"] < 1e-6
        assert row["post_clip_norm"] == pytest.approx(1.0, rel=1e-5)
        assert row["h2d_bytes"] == row["d2h_bytes"] == row["payload_bytes"]
        assert row["total_ms"].keys() == {"p50", "p95"}
        assert row_from_json(row).to_json() == row
    conditions = json.loads(file.read_text())["conditions"]
    assert {"cpu", "torch", "commit", "injected", "versions"} <= conditions.keys()
    assert f"each copy takes {conditions['injected']['copy_us']:g} us" in table


def test_what_fails_is_shown_with_its_own_words_and_tried_with_gloo(tmp_path):
    file = tmp_path / "rows.json"
    options = ("--layout", "hsdp2x4", "--ranks", "4", "--scale", "0.01", "--json", str(file))
    table = run(*options, methods=["hyper_parallel", "torch"])
    rows = rows_of(file)
    assert list(rows) == ["hyper_parallel", "torch", "torch+gloo"]
    assert not rows["torch"]["supported"]
    assert rows["torch"]["error"] in table
    assert "No backend type associated with device type cpu" in rows["torch"]["error"]
    assert rows["torch+gloo"]["group"] == "cpu:gloo,npu:hccl"
    assert [rows["torch+gloo"][name] for name in ("h2d", "d2h", "collectives")] == [0, 0, 1]
    assert not rows["torch+gloo"]["wrong"]


def test_trace_names_the_six_steps(tmp_path):
    file = tmp_path / "trace.json"
    options = ("--layout", "fsdp8", "--ranks", "2", "--scale", "0.01", "--trace", str(file))
    run(*options, methods=["hyper_parallel"])
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert names >= {f"hyper_parallel::{step}" for step in STEPS}


def test_runs_without_an_accelerator(tmp_path):
    file = tmp_path / "rows.json"
    options = ("--layout", "hsdp2x4", "--ranks", "2", "--scale", "0.01", "--json", str(file))
    run(*options, "--device", "cpu", methods=["hyper_parallel", "torch"])
    counts = {method: row["collectives"] for method, row in rows_of(file).items()}
    assert counts["hyper_parallel"] == 1
    assert rows_of(file)["torch"]["h2d"] == 0


def test_kimi_k2_layout_has_the_model_s_shards():
    layout = load_layout("kimi_k2")
    assert len(layout.parameters) == 915
    assert layout.numel_per_rank == sum(kimi_k2_shards()) == 8_019_032_760


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_scaled_layout_keeps_every_parameter(name):
    whole, scaled = load_layout(name), load_layout(name, 0.01)
    assert [p.name for p in scaled.parameters] == [p.name for p in whole.parameters]
    assert 0.005 < scaled.numel_per_rank / whole.numel_per_rank < 0.02
    assert len({p.name for p in whole.parameters}) == len(whole.parameters)


def test_multi_component_has_eight_rank_sets():
    layout = load_layout("multi_component")
    buckets = {(p.mesh, p.placements) for p in layout.parameters}
    assert len(buckets) == 9  # two of them are sharded over all ranks
    assert layout.num_hops(8) == 15


def outcome(**fields):
    sample = Sample(start_s=1.0, end_s=1.5, cpu_s=0.2, counts=None)
    known = {"norm": 2.0, "true_norm": 2.0, "post_clip_norm": 1.0}
    return Outcome(**{**known, **fields}, samples=[sample], seen=[Seen(norm_s=0.1)])


def row_of(*outcomes) -> Row:
    identity = dict.fromkeys(("method", "layout", "group", "version"), "any") | {"ranks": 2}
    return build_row(identity, outcomes, 1.0)


@pytest.mark.parametrize(
    ("fields", "is_wrong"),
    [
        ({}, False),
        ({"norm": 2.001}, True),
        ({"norm": float("nan")}, True),
        ({"post_clip_norm": 1.001}, True),
    ],
)
def test_wrong_norm_on_one_rank_is_marked(fields, is_wrong):
    post_clip_of_all = {k: v for k, v in fields.items() if k == "post_clip_norm"}
    row = row_of(outcome(**post_clip_of_all), outcome(**fields))
    assert row.wrong == is_wrong


def test_times_are_of_the_slowest_rank():
    late = outcome()
    late.samples[0] = Sample(start_s=1.1, end_s=1.7, cpu_s=0.3, counts=None)
    row = row_of(outcome(), late)
    assert row.total_ms.p50 == pytest.approx(600)
    assert row.skew_ms.p50 == pytest.approx(100)
    assert row.python_ms.p50 == pytest.approx(200)
    assert row.wait_ms.p50 == pytest.approx(300)


def test_hang_is_told_with_what_the_ranks_were_doing():
    def hang(say):
        say("waiting for nobody")
        if dist.get_rank() == 0:
            time.sleep(60)

    with pytest.raises(RankFailedError, match="hung") as raised:
        run_ranks(hang, 2, backend="gloo", silence_s=2.0)
    assert raised.value.doing == "waiting for nobody"


def test_method_that_ends_a_rank_is_left_out_and_shown(monkeypatch, tmp_path):
    import clip_latency

    class Fatal(METHODS["scalar_hop"]):
        def clip(self):
            os._exit(3)

    monkeypatch.setitem(METHODS, "fatal", Fatal)
    arguments = "--layout fsdp8 --ranks 2 --device cpu --scale 0.001 --repeats 1 --methods"
    monkeypatch.setattr(sys, "argv", ["", *arguments.split(), "fatal", "hyper_parallel"])
    rows, _ = clip_latency.measure(clip_latency.parse_arguments())
    assert [(row.method, row.supported) for row in rows] == [
        ("fatal", False),
        ("hyper_parallel", True),
    ]
    assert "died without a word" in rows[0].error
