"""Command line: ``python -m hyper_parallel.trainer CONFIG.yaml``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hyper_parallel.trainer.config import ConfigError, load_config
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.launch import RankFailedError, exit_on_sigterm, launch
from hyper_parallel.trainer.train import train

EXIT_CONFIG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the YAML file says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.trainer")
    parser.add_argument("config", help="YAML file, see configs/")
    path = parser.parse_args(arguments).config
    exit_on_sigterm()
    try:
        config = load_config(path)
        load_corpus(config.data, seq_len=config.training.seq_len)
        launch(train, config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
