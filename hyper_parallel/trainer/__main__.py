"""Command line: ``python -m hyper_parallel.trainer CONFIG.yaml``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hyper_parallel.trainer.command_line import run_command
from hyper_parallel.trainer.config import load_config
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.launch import launch
from hyper_parallel.trainer.train import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the YAML file says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.trainer")
    parser.add_argument("config", help="YAML file, see configs/")
    path = parser.parse_args(arguments).config
    return run_command(lambda: _run(path))


def _run(path: str) -> int:
    config = load_config(path)
    load_corpus(config.data, seq_len=config.training.seq_len)
    launch(train, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
