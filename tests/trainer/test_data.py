from pathlib import Path

import pytest
import torch

from hyper_parallel.trainer.config import ConfigError, DataConfig
from hyper_parallel.trainer.data import VOCAB_SIZE, load_corpus

UNREADABLE = "/proc/self/mem"  # for root as well: nothing is mapped at 0
SHAPE = {"batch_size": 3, "seq_len": 16}


def test_default_corpus_is_capped_text_that_is_here_on_any_machine():
    corpus = load_corpus(DataConfig(max_bytes=100_000), seq_len=16)
    assert corpus.tokens.numel() == 100_000
    assert b"def " in bytes(corpus.tokens.tolist())
    assert int(corpus.tokens.max()) < VOCAB_SIZE


def test_batches_are_sequences_of_the_text():
    corpus = load_corpus(DataConfig(max_bytes=5_000), seq_len=16)
    batch = corpus.batch(seed=0, step=1, dp_rank=0, **SHAPE)
    assert batch.shape == (3, 17)
    assert batch.dtype == torch.int64
    text = bytes(corpus.tokens.tolist())
    assert all(bytes(sequence.tolist()) in text for sequence in batch)


def test_batches_repeat_for_equal_seed_step_and_rank_and_differ_else():
    corpus = load_corpus(DataConfig(), seq_len=16)
    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]

    def draw(key):
        seed, step, dp_rank = key
        return corpus.batch(seed=seed, step=step, dp_rank=dp_rank, **SHAPE).tolist()

    batches = [draw(key) for key in keys]
    assert batches == [draw(key) for key in keys]
    assert all(a != b for i, a in enumerate(batches) for b in batches[:i])


def test_shortest_possible_text_is_used_whole(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcde")
    corpus = load_corpus(DataConfig(path=str(path)), seq_len=4)
    batch = corpus.batch(seed=0, step=1, dp_rank=0, batch_size=1, seq_len=4)
    assert bytes(batch[0].tolist()) == b"abcde"


def test_folder_is_read_in_the_order_of_its_names_text_only(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a.md").write_text("aa")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "deeper" / "c.py").write_text("cc")
    corpus = load_corpus(DataConfig(path=str(tmp_path)), seq_len=2)
    assert bytes(corpus.tokens.tolist()) == b"aabbcc"


def test_too_little_text_names_the_key_and_what_was_found(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abc")
    with pytest.raises(ConfigError, match=r"data\.path.*needs 5 bytes.*found 3"):
        load_corpus(DataConfig(path=str(path)), seq_len=4)


@pytest.mark.skipif(not Path(UNREADABLE).exists(), reason="needs a file that cannot be read")
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_text_that_cannot_be_read_names_the_key_and_the_file(tmp_path, in_folder):
    path = UNREADABLE
    if in_folder:
        (tmp_path / "a.txt").write_text("abc")
        (tmp_path / "b.txt").symlink_to(UNREADABLE)
        path = tmp_path / "b.txt"
    config = DataConfig(path=str(tmp_path if in_folder else path))
    with pytest.raises(ConfigError, match=rf"data\.path: .* cannot be read: .*{path}"):
        load_corpus(config, seq_len=4)
