"""The layout as a table: of a reducer, and of a configuration without training."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hyper_parallel import NormReducer
from hyper_parallel.explain import explain
from hyper_parallel.trainer.config import parse_config
from tests.commands import ROOT, output_of, run_python
from tests.ranks import run_ranks
from tests.sharding import both, mesh_of, parameter

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def row_of(table, ranks):
    """Return [lane, parameters, bytes, why] of the row with these ranks."""
    [line] = [line for line in table.splitlines() if f"  {ranks}  " in f"{line}  "]
    lane, _, rest = line.partition(f"  {ranks}  ")
    return [lane.strip(), *rest.split(None, 2)]


@both
def test_reducer_explains_its_lanes(backend):
    """PP 2 x HSDP 2 x 2, with a bias that each rank holds whole and experts by hand."""

    def rank_main(rank):
        mesh = mesh_of(backend, (2, 2, 2), ("pp", "replicate", "shard"))
        hsdp = [Replicate(), Shard(0)]
        model = torch.nn.ParameterList(
            [parameter(torch.ones(8), mesh["replicate", "shard"], hsdp) for _ in range(3)]
            + [parameter(torch.ones(5)), parameter(torch.ones(6)), parameter(torch.ones(7))]
        )
        pp, ep = mesh.get_group("pp"), mesh.get_group("replicate")
        reducer = NormReducer(
            model, pp_group=pp, sharded_over={model[4]: ep}, replicated_over={model[5]: pp}
        )
        return reducer.explain()

    tables = run_ranks(rank_main, 8, backend=backend)
    table = tables[0]
    assert table.startswith("group:    ranks 0-7 (the default group, since no group= was given)")
    assert f"reduced on {'npu:0' if backend == 'hccl' else 'cpu'}" in table
    assert "pp_group: ranks 0, 4" in table
    # 12 lanes: 4 of HSDP, 4 of pp groups, 4 of experts.
    assert "buffer:   4,984 bytes: 12 x 102 floats for the lanes, 22 for the header" in table
    assert row_of(table, "0-1")[1:] == ["3", "48", "sharded; replicas on 2-3"]
    assert row_of(table, "0, 2")[1:] == ["1", "24", "declared as sharded (sharded_over)"]
    assert row_of(table, "0, 4")[1:3] == ["2", "48"]
    assert row_of(table, "4-5")[1:] == ["0", "0", "of pp peers"]
    assert "and 7 lanes that this rank does not read" in table
    assert row_of(tables[4], "this one")[1:3] == ["1", "28"]
    assert "copies that another rank of the pp group counts" in tables[4]


def test_reducer_without_ranks_explains_itself():
    table = NormReducer(torch.nn.Linear(3, 2)).explain()
    assert table.startswith("group:    this rank alone, no collective")
    assert row_of(table, "this one") == ["-", "2", "32", "held whole: added after the reduce"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_explained_without_training(path):
    table = output_of("-m", "hyper_parallel.explain", path).stdout
    assert "kernels:  " in table
    numbers = {
        "text_moe_fsdp2_gloo": {"0-1": "35"},
        "text_moe_fsdp8_ep4_offload": {"0-7": "35"},
        "text_moe_fsdp4_tp2_ep4_offload": {"0-7": "18", "0, 2, 4, 6": "17", "1, 3, 5, 7": "17"},
    }[path.stem]
    for ranks, num_parameters in numbers.items():
        assert row_of(table, ranks)[1] == num_parameters
    if "tp2" in path.stem:
        assert "replicas on 1, 3, 5, 7" in row_of(table, "0, 2, 4, 6")[3]
        assert "replicas on 0, 2, 4, 6" in row_of(table, "1, 3, 5, 7")[3]


def test_wrong_configuration_is_told_in_words(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("accelerator: {ep_sise: 2}\n")
    run = run_python("-m", "hyper_parallel.explain", path)
    assert run.returncode == 2
    assert "did you mean ep_size" in run.stderr


def test_torch_distributed_is_left_as_it_was():
    config = parse_config({"training": {"backend": "gloo"}, "fsdp_config": {"dp_shard_size": 1}})
    assert "this one" in explain(config)
    assert not torch.distributed.is_initialized()
