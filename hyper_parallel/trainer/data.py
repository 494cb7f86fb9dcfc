"""Byte-level text: a corpus that any machine has, and batches that depend on nothing else."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyper_parallel.trainer.config import ConfigError, DataConfig

__all__ = ["VOCAB_SIZE", "Corpus", "load_corpus"]

VOCAB_SIZE = 256
_TEXT_SUFFIXES = frozenset({".md", ".py", ".rst", ".txt"})


@dataclass(frozen=True)
class Corpus:
    """Text as bytes; a token is a byte."""

    name: str
    tokens: Tensor  # [num_bytes] uint8, host

    def batch(self, *, seed: int, step: int, dp_rank: int, batch_size: int, seq_len: int) -> Tensor:
        """Draw sequences that only (seed, step, dp_rank) decide.

        Returns:
            [batch_size, seq_len + 1] int64 on the host: inputs and, one further on, targets.
        """
        # A string seed is hashed by its content, on every machine and Python alike.
        draw = random.Random(f"{seed}/{step}/{dp_rank}")
        last_start = self.tokens.numel() - seq_len - 1
        starts = [draw.randint(0, last_start) for _ in range(batch_size)]
        return torch.stack([self.tokens[start : start + seq_len + 1] for start in starts]).long()


def load_corpus(config: DataConfig, *, seq_len: int) -> Corpus:
    """Read the text of `config.path`, by default the sources of Python's standard library.

    Raises:
        ConfigError: There is not enough text for one sequence.
    """
    root = Path(config.path) if config.path else Path(sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else _text_files(root, recursive=config.path is not None)
    text = bytearray()
    for file in files:
        with file.open("rb") as opened:
            text += opened.read(config.max_bytes - len(text))
        if len(text) == config.max_bytes:
            break
    if len(text) < seq_len + 1:
        needed = f"training.seq_len {seq_len} needs {seq_len + 1} bytes of text"
        raise ConfigError([f"data.path / data.max_bytes: {needed}, found {len(text)} in {root}"])
    name = str(root) if config.path else "Python's standard library sources"
    return Corpus(name, torch.frombuffer(text, dtype=torch.uint8))


def _text_files(folder: Path, *, recursive: bool) -> list[Path]:
    found = folder.rglob("*") if recursive else folder.glob("*")
    return sorted(path for path in found if path.suffix in _TEXT_SUFFIXES and path.is_file())
