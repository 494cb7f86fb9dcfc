"""The training loop of one rank."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel import ClipResult, NormBeforeOffload, NormReducer
from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.testing import simnpu
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import VOCAB_SIZE, load_corpus
from hyper_parallel.trainer.launch import say, uses_simulator
from hyper_parallel.trainer.model import Transformer
from hyper_parallel.trainer.parallelize import build_meshes, parallelize

__all__ = ["StepRecord", "Trainer", "train"]


@dataclass(frozen=True)
class HostBytes:
    """Bytes of gradients in host memory that a clip touched."""

    host_bytes_read: int = 0
    host_bytes_written: int = 0
    sampled_bytes_read: int = 0  # besides: to see whether norms taken before the offload hold


@dataclass(frozen=True)
class StepRecord:
    """One step as one rank saw it; floats hold the measured float32 values exactly."""

    step: int
    loss: float  # mean over all ranks' tokens
    grad_norm: float  # before the clip
    clip_coef: float
    tokens_per_s: float  # all ranks together
    clip_cost: Copies
    clip_bytes: HostBytes = HostBytes()

    def __str__(self) -> str:
        counts = dataclasses.asdict(self.clip_cost) | dataclasses.asdict(self.clip_bytes)
        clip_cost = ", ".join(f"{name} {count}" for name, count in counts.items())
        return (
            f"loss {self.loss:.4f}  grad norm {self.grad_norm:.4e}  "
            f"clip coef {self.clip_coef:.4f}  {self.tokens_per_s:.0f} tokens/s  "
            f"clip: {clip_cost}"
        )


class Trainer:
    """Model, data and optimizer of one rank. Ranks: every method is called by all."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.corpus = load_corpus(config.data, seq_len=config.training.seq_len)
        self.device = torch.device(config.device_type)
        self.meshes = build_meshes(config)
        self.model = _build_model(config)
        offload = config.fsdp_config.enable_offload
        parallelize(self.model, self.meshes, offload=offload)
        if not offload:
            self.model.to(self.device)
        self.reducer = NormReducer(self.model)
        self.early = self._norm_before_offload()
        # fused: the one implementation that exists for host and device, hence equal in every bit.
        self.optimizer = torch.optim.AdamW(
            _groups_by_mesh(self.model), lr=config.training.lr, fused=True
        )

    def train(self) -> list[StepRecord]:
        """Train for the configured number of steps and print each."""
        say(self._describe())
        records = []
        for step in range(1, self.config.training.steps + 1):
            records.append(self.step(step))
            say(f"step {step:>3}/{self.config.training.steps}  {records[-1]}")
        return records

    def step(self, step: int) -> StepRecord:
        """Train for one step; `step` picks the batch."""
        started = time.perf_counter()
        loss = self.forward_backward(step)
        result, cost = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss, group=self.meshes.fsdp.get_group())
        training = self.config.training
        num_batches = self.meshes.fsdp.size()
        # Sync: the values that are printed, and with them the end of the step's work.
        mean_loss = loss.item() / num_batches
        grad_norm, clip_coef = result.total_norm.item(), result.clip_coef.item()
        elapsed_s = time.perf_counter() - started
        num_tokens = num_batches * training.batch_size * training.seq_len
        return StepRecord(
            step,
            mean_loss,
            grad_norm,
            clip_coef,
            num_tokens / elapsed_s,
            cost,
            HostBytes(result.host_bytes_read, result.host_bytes_written, result.sampled_bytes_read),
        )

    def forward_backward(self, step: int) -> Tensor:
        """Leave averaged gradients on the parameters and return the loss of this rank's batch."""
        loss = next_byte_loss(self.model, self.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def batch(self, step: int) -> Tensor:
        """Draw this rank's sequences, on the device; ranks of one `tp` axis get the same."""
        training = self.config.training
        return self.corpus.batch(
            seed=training.seed,
            step=step,
            dp_rank=self.meshes.fsdp.get_local_rank(),
            batch_size=training.batch_size,
            seq_len=training.seq_len,
        ).to(self.device)

    def clip(self) -> tuple[ClipResult, Copies]:
        """Clip by the total norm, and say what that cost."""
        simulated = uses_simulator(self.config)
        before = _simulator_counts() if simulated else Copies()
        training = self.config.training
        result = self.reducer.clip_(
            self.model.parameters(),
            training.max_grad_norm,
            optimizer=self.optimizer if training.clip_in_optimizer else None,
        )
        return result, _simulator_counts() - before if simulated else result.copies

    def _norm_before_offload(self) -> NormBeforeOffload | None:
        if not (
            self.config.training.norm_before_offload and self.config.fsdp_config.enable_offload
        ):
            return None
        try:
            return NormBeforeOffload(self.model)
        except ValueError as error:  # the device lacks what it takes; the clip is right without
            say(f"training.norm_before_offload is of no use here: {error}")
            return None

    def _describe(self) -> str:
        config, meshes = self.config, self.meshes
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        where = "host (offload)" if config.fsdp_config.enable_offload else config.device_type
        return (
            f"{config.num_ranks} ranks: fsdp {meshes.fsdp.size()} x tp {meshes.tp.size()}, "
            f"experts efsdp {meshes.efsdp.size()} x ep {meshes.ep.size()}; {numel:,} parameters "
            f"on the {where}; text: {self.corpus.name}, {self.corpus.tokens.numel():,} bytes"
        )


def train(config: Config) -> list[StepRecord]:
    """Train on this rank. Ranks: all."""
    return Trainer(config).train()


def next_byte_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean cross entropy of each byte given those before it; sequences: [batch, seq_len + 1]."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def _build_model(config: Config) -> Transformer:
    """Build on the host from the seed: equal weights on all ranks, whatever the devices."""
    torch.manual_seed(config.training.seed)
    return Transformer(config.model, vocab_size=VOCAB_SIZE, seq_len=config.training.seq_len)


def _groups_by_mesh(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Make one optimizer group per mesh: DTensor's fused operators want one mesh a call."""
    groups: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        data = parameter.data
        groups[data.device_mesh if isinstance(data, DTensor) else None].append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _simulator_counts() -> Copies:
    counts = simnpu.counters()
    return Copies(**{item.name: counts[item.name] for item in dataclasses.fields(Copies)})
