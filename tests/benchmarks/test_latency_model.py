"""The model adds up terms whose sources are told; the README shows what the results say."""

import dataclasses
from pathlib import Path

import pytest
from latency_constants import LEVELS, injected_latencies, load_machines
from latency_model import (
    METHODS,
    NUM_RANKS,
    SOURCES,
    Measured,
    Model,
    allreduce_us,
    predict,
    predict_all,
)
from readme_tables import render, update_readme

ROOT = Path(__file__).resolve().parents[2]
MODEL = Model(elements=8_000_000_000, buckets=8, dims=2)
MEASURED = Measured(
    norm_s=2.0,
    scale_s=4.0,
    norm_of_limit=0.8,
    scale_of_limit=0.5,
    python_s=dict.fromkeys(METHODS, 0.001),
)


def test_every_constant_has_bounds_a_source_and_a_confidence():
    for machine in load_machines().values():
        for name, constant in machine.constants.items():
            low, typical, high = (constant.values[level] for level in LEVELS)
            assert 0 <= low <= typical <= high, name
            assert constant.unit in ("us", "GB/s")
            assert constant.source
            assert constant.confidence in ("high", "medium", "low")


def test_simulator_gets_the_typical_durations_of_one_machine():
    a2 = load_machines()["a2"]
    copies = (a2.at("h2d_pageable", "typical") + a2.at("d2h_and_sync", "typical")) / 2
    assert injected_latencies() == {"copy_us": copies, "collective_us": 60 + 25}


def test_allreduce_takes_log_of_servers_steps():
    a2 = load_machines()["a2"]
    # 25 us in a server, 2 log2(128 / 8) steps of 12 us between servers, 60 us to dispatch it.
    assert allreduce_us(a2, 128, 0, "typical") == pytest.approx(25 + 8 * 12 + 60)
    assert allreduce_us(a2, 8, 0, "typical") == pytest.approx(25 + 60)


def test_supernode_ends_the_fast_links():
    a3 = load_machines()["a3"]
    inside = allreduce_us(a3, 512, 0, "typical")
    assert allreduce_us(a3, 1024, 0, "typical") == pytest.approx(inside + 2 * 12)


def test_terms_of_hops_and_of_one_packed_reduce():
    a2 = load_machines()["a2"]
    hop = predict("scalar_hop", a2, 128, "typical", MODEL, MEASURED).terms_ms
    assert hop["copies"] == pytest.approx(16 * (40 + 45) * 1e-3)
    assert hop["collectives"] == pytest.approx(8 * (181 + 85) * 1e-3, rel=1e-4)
    assert (hop["host norm"], hop["scale"]) == (2000, 4000)
    ours = predict("hyper_parallel", a2, 128, "typical", MODEL, MEASURED).terms_ms
    assert ours["copies"] == pytest.approx((15 + 45) * 1e-3)
    assert ours["host norm"] == pytest.approx(32e9 / 32e9 * 1e3 / 0.8)
    assert ours["scale"] == pytest.approx(2 * 32e9 / 32e9 * 1e3 / 0.5)
    none = predict("hyper_parallel, no host pass", a2, 128, "typical", MODEL, MEASURED).terms_ms
    assert (none["host norm"], none["scale"]) == (0, 0)


def test_every_cell_has_a_band_and_every_term_a_source():
    predictions = predict_all(MODEL, MEASURED)
    assert len(predictions) == 3 * len(NUM_RANKS) * len(METHODS) * len(LEVELS)
    totals = {(p.machine, p.ranks, p.method, p.level): p.total_ms for p in predictions}
    for p in predictions:
        low, typical, high = (totals[p.machine, p.ranks, p.method, level] for level in LEVELS)
        assert low < typical < high
        assert p.terms_ms.keys() == SOURCES.keys()
    assert {source.split()[0] for source in SOURCES.values()} == {"measured", "injected"}
    assert dataclasses.asdict(predictions[0])["terms_ms"]


def test_readme_shows_what_the_committed_results_say(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    update_readme(readme, ROOT / "benchmarks" / "results")
    assert readme.read_text() == (ROOT / "README.md").read_text()
    assert render(ROOT / "benchmarks" / "results") in readme.read_text()


def test_charts_are_small():
    charts = list((ROOT / "benchmarks" / "results").glob("*.png"))
    assert charts
    assert all(chart.stat().st_size < 200_000 for chart in charts)
