"""Command line: ``python -m hyper_parallel.explain CONFIG.yaml``.

Prints how the gradients of a training configuration are reduced, without training: each rank's
model is sharded in turn, in this process, on the meta device.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.grad_shards import GradShards, foretell_grad_shards
from hyper_parallel.platform.torch.lanes import ShardUnion, build_layout
from hyper_parallel.platform.torch.layout_table import (
    LaneUse,
    describe_buffer,
    describe_kernels,
    format_lanes,
    lane_uses,
)
from hyper_parallel.platform.torch.parameter_list import ParameterList
from hyper_parallel.platform.torch.torch_private import init_dry_run
from hyper_parallel.trainer.command_line import run_command
from hyper_parallel.trainer.config import Config, load_config
from hyper_parallel.trainer.data import VOCAB_SIZE
from hyper_parallel.trainer.model import Transformer
from hyper_parallel.trainer.parallelize import build_meshes, parallelize

__all__ = ["explain", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of one configuration; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.explain")
    parser.add_argument("config", help="YAML file, see configs/")
    path = parser.parse_args(arguments).config
    return run_command(lambda: _run(path))


def _run(path: str) -> int:
    print(explain(load_config(path)))  # noqa: T201
    return 0


def explain(config: Config) -> str:
    """Return the lanes of all ranks as a table, each with what its lowest rank has in it.

    torch.distributed must not be initialized: ranks are played one after the other.
    """
    ranks = range(config.num_ranks)
    foretold = [_foretell(config, rank) for rank in ranks]
    keys = {key for shards in foretold for key in shards.lane_keys}
    rank_sets = [key for key in keys if not isinstance(key, ShardUnion)]
    layouts = [build_layout(rank_sets, rank) for rank in ranks]
    uses: dict[tuple[int, ...], LaneUse] = {}
    for shards, layout in zip(foretold, layouts, strict=True):
        for use in lane_uses(shards, layout):
            uses.setdefault(use.rank_set, use)
    lane_of = layouts[0].lane_of
    ordered = sorted(uses.values(), key=lambda use: lane_of.get(use.rank_set, len(lane_of)))
    where = "host (offload)" if config.fsdp_config.enable_offload else config.device_type
    lines = [
        f"group:    ranks 0-{config.num_ranks - 1} (the default group), {config.training.backend}; "
        f"gradients on the {where}",
        f"buffer:   {describe_buffer(config.num_ranks, len(lane_of))}",
        f"kernels:  {describe_kernels()}",
        format_lanes(ordered, lane_of),
    ]
    return "\n".join(lines)


def _foretell(config: Config, rank: int) -> GradShards:
    """Return the shards that a rank would have: rank sets do not depend on devices."""
    on_cpu = dataclasses.replace(
        config, training=dataclasses.replace(config.training, backend="gloo")
    )
    init_dry_run(rank, config.num_ranks)
    try:
        with torch.device("meta"):
            model = Transformer(
                config.model, vocab_size=VOCAB_SIZE, seq_len=config.training.seq_len
            )
        parallelize(model, build_meshes(on_cpu), offload=False)
        return foretell_grad_shards(ParameterList(model))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
