"""What the keys for the clip change: bytes of host memory, and nothing of the training."""

import pytest

from hyper_parallel.trainer.config import parse_config
from hyper_parallel.trainer.train import HostBytes, Trainer
from tests.ranks import run_ranks

MODEL = {"dim": 16, "num_heads": 2, "mlp_dim": 24, "expert_dim": 8, "num_experts": 4}


def config(*, offload=True, **training):
    return parse_config(
        {
            "model": MODEL,
            "training": {"batch_size": 2, "seq_len": 16, "max_grad_norm": 0.05, **training},
            "accelerator": {"ep_size": 2},
            "fsdp_config": {"dp_shard_size": 2, "enable_offload": offload},
        }
    )


@pytest.mark.simnpu
def test_each_key_saves_its_pass():
    def rank_main(rank):
        rows = []
        for early in (True, False):
            for deferred in (True, False):
                keys = {"norm_before_offload": early, "clip_in_optimizer": deferred}
                trainer = Trainer(config(**keys))
                one_pass = 4 * sum(p.to_local().numel() for p in trainer.model.parameters())
                records = [trainer.step(step) for step in range(1, 4)]
                moved = records[-1].clip_bytes
                passes = moved.host_bytes_read / one_pass, moved.host_bytes_written / one_pass
                losses = [record.loss for record in records]
                rows.append((passes, moved.sampled_bytes_read > 0, losses, records[0].grad_norm))
                del trainer
        return rows

    for rows in run_ranks(rank_main, 2, backend="hccl", timeout_s=50):
        assert [row[:2] for row in rows] == [
            ((0, 0), True),
            ((1, 1), True),
            ((1, 0), False),
            ((2, 1), False),
        ]
        for first, second in ((0, 2), (1, 3)):  # whatever the norm comes from
            assert rows[first][2:] == rows[second][2:]
        assert rows[0][2] == pytest.approx(rows[1][2], rel=1e-5)


@pytest.mark.simnpu
def test_keys_are_harmless_without_offload():
    def rank_main(rank):
        trainer = Trainer(config(offload=False))
        return trainer.early is None, trainer.step(1).clip_bytes

    assert run_ranks(rank_main, 2, backend="hccl") == [(True, HostBytes())] * 2
