import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.trainer import launch as launch_module
from hyper_parallel.trainer.config import Config, ConfigError, parse_config
from hyper_parallel.trainer.launch import (
    RankFailedError,
    _end_with_parent,
    _Ranks,
    launch,
    validate_machine,
)


def gloo_config(num_ranks: int) -> Config:
    return parse_config(
        {"training": {"backend": "gloo"}, "fsdp_config": {"dp_shard_size": num_ranks}}
    )


def sum_of_ranks(config: Config) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_rank_1(config: Config) -> None:
    if dist.get_rank() == 1:
        raise ValueError("the data ran out")
    signal.pause()  # a rank that would never end by itself


def die_on_rank_1(config: Config) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_launch_returns_the_results_by_rank():
    assert launch(sum_of_ranks, gloo_config(3)) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_ranks_can_be_spawned_as_accelerators_need(tmp_path):
    ranks = _Ranks("spawn")
    try:
        ranks.start(0, sum_of_ranks, gloo_config(1), str(tmp_path / "store"))
        assert ranks.collect() == [(0, 0.0)]
    finally:
        ranks.end()


@pytest.mark.timeout(20)
def test_failure_of_one_rank_ends_all_with_its_message():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1.*the data ran out"):
        launch(fail_on_rank_1, gloo_config(3))
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(20)
def test_rank_that_is_killed_ends_all_with_its_exit_code():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1.*without a word, exit code -9"):
        launch(die_on_rank_1, gloo_config(3))
    assert multiprocessing.active_children() == []


def test_rank_whose_parent_is_gone_already_ends():
    gone = 1 if os.getpid() != 1 else 2  # not the parent of what this process starts
    process = multiprocessing.get_context("fork").Process(target=_end_with_parent, args=(gone,))
    process.start()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("backend", ["gloo", "hccl"])
def test_more_ranks_than_one_machine_runs_are_refused(monkeypatch, backend):
    monkeypatch.setattr(launch_module, "_available_bytes", lambda: 2**50)
    ranks = {"dp_shard_size": 128}
    config = parse_config({"training": {"backend": backend}, "fsdp_config": ranks})
    message = r"fsdp_config\.dp_shard_size / .*tp_size: 128 x 1 ranks, but at most 127 run here"
    with pytest.raises(ConfigError, match=message):
        validate_machine(config)
    validate_machine(gloo_config(127))


def test_more_ranks_than_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(launch_module, "_available_bytes", lambda: 450 * 2**20)
    with pytest.raises(ConfigError, match=r"dp_shard_size .*at most 4 run here: 450 MiB are free"):
        validate_machine(gloo_config(5))
    validate_machine(gloo_config(4))


def test_memory_of_this_machine_is_found():
    assert launch_module._available_bytes() > 2**20


def test_rank_that_the_machine_refuses_names_the_keys_and_ends_the_others(monkeypatch):
    start = _Ranks.start

    def start_two(self, rank, *arguments):
        if rank == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(self, rank, *arguments)

    monkeypatch.setattr(_Ranks, "start", start_two)
    with pytest.raises(ConfigError, match=r"dp_shard_size .*4 ranks, but after 2 .*unavailable"):
        launch(sum_of_ranks, gloo_config(4))
    assert multiprocessing.active_children() == []


def test_torchrun_with_another_number_of_ranks_is_refused(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = r"fsdp_config\.dp_shard_size / accelerator\.tp_size: 4 x 1 .*torchrun started 2"
    with pytest.raises(ConfigError, match=message):
        launch(sum_of_ranks, gloo_config(4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_accelerator_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"training\.backend: nccl needs a cuda device"):
        validate_machine(parse_config({"training": {"backend": "nccl"}}))
