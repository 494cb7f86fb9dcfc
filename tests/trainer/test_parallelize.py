"""The parallel model against the plain one: same gradients, same norm."""

from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.trainer.config import Config, parse_config
from hyper_parallel.trainer.data import VOCAB_SIZE
from hyper_parallel.trainer.model import Transformer
from hyper_parallel.trainer.train import Trainer, next_byte_loss
from tests.ranks import run_ranks


def small_config(*, dp: int, tp: int, ep: int, backend: str, offload: bool) -> Config:
    return parse_config(
        {
            "model": {"dim": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 24, "expert_dim": 24},
            "training": {"batch_size": 2, "seq_len": 12, "backend": backend},
            "accelerator": {"tp_size": tp, "ep_size": ep},
            "fsdp_config": {"dp_shard_size": dp, "enable_offload": offload},
        }
    )


class Comparison(NamedTuple):
    total_norm: float
    reference_norm: float
    counted: Copies  # by the simulator, where there is one
    reported: Copies  # by the reducer
    errors: dict[str, float]  # by parameter, relative to the norm of its reference gradient


def compare_with_one_process(rank: int, config: Config) -> Comparison:
    trainer = Trainer(config)
    trainer.forward_backward(1)
    reference = reference_gradients(trainer)
    errors = {}
    for name, parameter in trainer.model.named_parameters():
        error = full_gradient(parameter, config.device_type) - reference[name]
        errors[name] = (error.norm() / reference[name].norm()).item()
    result, counted = trainer.clip()
    squares = sum(gradient.double().square().sum() for gradient in reference.values())
    return Comparison(
        result.total_norm.item(), squares.sqrt().item(), counted, result.copies, errors
    )


def reference_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gradients of the plain model on all ranks' batches at once."""
    config, training = trainer.config, trainer.config.training
    torch.manual_seed(training.seed)
    model = Transformer(config.model, vocab_size=VOCAB_SIZE, seq_len=training.seq_len)
    batches = [
        trainer.corpus.batch(
            seed=training.seed,
            step=1,
            dp_rank=dp_rank,
            batch_size=training.batch_size,
            seq_len=training.seq_len,
        )
        for dp_rank in range(config.fsdp_config.dp_shard_size)
    ]
    next_byte_loss(model, torch.cat(batches)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def full_gradient(parameter: torch.Tensor, device_type: str) -> torch.Tensor:
    """Gather a gradient that may live on the host, where its mesh cannot communicate."""
    gradient = parameter.grad
    on_device = DTensor.from_local(
        gradient.to_local().to(device_type),
        gradient.device_mesh,
        gradient.placements,
        shape=gradient.shape,
        stride=gradient.stride(),
        run_check=False,
    )
    return on_device.full_tensor().cpu()


LAYOUTS = [
    pytest.param(2, 1, 1, id="dp2"),
    pytest.param(2, 1, 2, id="dp2-ep2"),
    pytest.param(8, 1, 4, id="dp8-ep4-efsdp2"),
    pytest.param(2, 2, 2, id="dp2-tp2-ep2-efsdp2"),
    pytest.param(1, 2, 1, id="dp1-tp2-efsdp2"),
]


def assert_matches(comparisons: list[Comparison], cost: Copies) -> None:
    assert len({comparison.total_norm for comparison in comparisons}) == 1, "ranks differ"
    for comparison in comparisons:
        assert comparison.counted == comparison.reported == cost
        assert comparison.total_norm == pytest.approx(comparison.reference_norm, rel=1e-5)
        # float32 sums in another order; a wrong divide factor would be off by a whole factor.
        assert max(comparison.errors.values()) < 1e-5, comparison.errors


@pytest.mark.simnpu
@pytest.mark.parametrize(("dp", "tp", "ep"), LAYOUTS)
def test_offloaded_gradients_and_norm_equal_one_process(dp, tp, ep):
    config = small_config(dp=dp, tp=tp, ep=ep, backend="hccl", offload=True)
    comparisons = run_ranks(compare_with_one_process, dp * tp, config, backend="hccl")
    assert_matches(comparisons, Copies(h2d=0, collectives=1, d2h=1, host_syncs=1))


@pytest.mark.parametrize(
    ("dp", "tp", "ep"),
    [
        pytest.param(2, 2, 4, id="dp2-tp2-ep4-efsdp1"),
        pytest.param(4, 1, 2, id="dp4-ep2-efsdp2"),
        pytest.param(3, 1, 1, id="dp3-efsdp3"),
    ],
)
def test_gradients_and_norm_on_gloo_equal_one_process(dp, tp, ep):
    config = small_config(dp=dp, tp=tp, ep=ep, backend="gloo", offload=False)
    comparisons = run_ranks(compare_with_one_process, dp * tp, config, backend="gloo")
    assert_matches(comparisons, Copies(h2d=0, collectives=1, d2h=0, host_syncs=0))


def test_experts_evaluate_without_gradients():
    config = small_config(dp=2, tp=1, ep=2, backend="gloo", offload=False)
    losses = run_ranks(loss_with_and_without_gradients, 2, config, backend="gloo")
    assert all(with_gradients == without for with_gradients, without in losses)


def loss_with_and_without_gradients(rank: int, config: Config) -> tuple[float, float]:
    trainer = Trainer(config)
    with_gradients = trainer.forward_backward(1)
    with torch.no_grad():
        without = next_byte_loss(trainer.model, trainer.batch(1))
    return with_gradients.item(), without.item()
