"""The benchmark runs, verifies its results and writes what it promises; no time is asserted."""

import json

from tests.commands import output_of

FIELDS = {
    "op": str,
    "dtype": str,
    "layout": str,
    "provider": str,
    "threads": int,
    "ratio_to_limit": float,
    "median_ms": float,
    "p20_ms": float,
    "p80_ms": float,
    "gib_per_s": float,
    "rel_error": float,
}


def run(*options):
    return output_of("benchmarks/host_bandwidth.py", *options)


def test_small_run_writes_a_row_for_every_cell(tmp_path):
    file = tmp_path / "rows.json"
    outcome = run(
        "--shrink", "4096", "--repetitions", "1", "--threads", "1", "2", "--json", str(file)
    )
    report = json.loads(file.read_text())
    assert {name: type(value) for name, value in report["rows"][0].items()} == FIELDS
    ours = [row for row in report["rows"] if row["provider"] == "hyper_parallel"]
    cells = {(row["op"], row["dtype"], row["layout"], row["threads"]) for row in ours}
    assert len(cells) == len(ours) == 4 * 3 * 4 * 2
    assert all(row["rel_error"] <= 2.0**-42 for row in ours)
    providers = {row["provider"] for row in report["rows"]} - {"hyper_parallel"}
    assert all(provider.startswith("torch.") for provider in providers)
    assert {"cpu", "torch", "instruction_set", "limits"} <= report["conditions"].keys()
    assert len(report["conditions"]["limits"]) == 24
    assert "24/24 cells" in outcome.stderr
    assert len(outcome.stdout.splitlines()) == len(report["rows"]) + 1


def test_python_walk_is_measured_for_three_sizes():
    outcome = run("--python", "--repetitions", "1")
    counts = [line.split()[0] for line in outcome.stdout.splitlines()]
    assert counts == ["parameters", "915", "2000", "20000"]
