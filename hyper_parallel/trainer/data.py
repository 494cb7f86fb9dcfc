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
        ConfigError: It cannot be read, or there is not enough of it for one sequence.
    """
    is_default = config.path is None
    root = Path(sysconfig.get_paths()["stdlib"] if config.path is None else config.path)
    try:
        text = _read_text(root, recursive=not is_default, max_bytes=config.max_bytes)
    except OSError as error:
        raise ConfigError([f"data.path: {root} cannot be read: {error}"]) from error
    if len(text) < seq_len + 1:
        needed = f"training.seq_len {seq_len} needs {seq_len + 1} bytes of text"
        raise ConfigError([f"data.path / data.max_bytes: {needed}, found {len(text)} in {root}"])
    name = "Python's standard library sources" if is_default else str(root)
    return Corpus(name, torch.frombuffer(text, dtype=torch.uint8))


def _read_text(root: Path, *, recursive: bool, max_bytes: int) -> bytearray:
    text = bytearray()
    for file in [root] if root.is_file() else _text_files(root, recursive=recursive):
        try:
            with file.open("rb") as opened:
                text += opened.read(max_bytes - len(text))
        except OSError as error:  # which may not name the file: reading does not
            raise OSError(error.errno, error.strerror, str(file)) from error
        if len(text) == max_bytes:
            break
    return text


def _text_files(folder: Path, *, recursive: bool) -> list[Path]:
    found = folder.rglob("*") if recursive else folder.glob("*")
    return sorted(path for path in found if path.suffix in _TEXT_SUFFIXES and path.is_file())
