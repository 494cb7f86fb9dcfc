"""The device benchmark runs wherever there is a device, here on the simulated NPU."""

import csv
import importlib
import json
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks


@pytest.fixture
def device_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("device_kernels")


@pytest.mark.simnpu
@pytest.mark.triton
def test_every_provider_is_verified_timed_and_saved(tmp_path, device_kernels):
    def rank_main(rank):
        del rank
        device_kernels.RESULTS = tmp_path / "benchmarks" / "results"
        device_kernels.RESULTS.parent.mkdir()
        device_kernels.NUM_SMALL = 20
        device_kernels.main(["--device", "npu", "--mib", "0.02", "--repeats", "5", "--save"])
        [saved] = device_kernels.RESULTS.iterdir()
        with saved.open() as file:
            return json.dumps(list(csv.DictReader(file)))

    [answer] = run_ranks(rank_main, 1, backend="hccl", timeout_s=50)
    rows = json.loads(answer)
    assert {row["provider"] for row in rows} == {"hyper_parallel", "torch"}
    assert {row["dtype"] for row in rows} == {"fp32", "bf16", "fp16"}
    assert {row["device"] for row in rows} == {"Simulated NPU"}
    assert all(float(row["median_us"]) >= 0 for row in rows)


def test_wrong_sums_are_not_timed(device_kernels):
    class Wrong:
        def partial_norms(self, tensors, power):
            del tensors, power
            return torch.zeros(1, 24)

    with pytest.raises(RuntimeError, match="should be"):
        device_kernels.verify([torch.ones(5)], Wrong())
