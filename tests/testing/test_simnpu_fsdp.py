"""Real FSDP2 with CPU offload runs on the simulated NPU and trains like a single process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from hyper_parallel.testing import simnpu
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.simnpu,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]

NUM_RANKS = 2
NUM_TOKENS = 16
STEPS = 3


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, NUM_TOKENS, (2 * NUM_RANKS, 7), generator=generator)


def train(model: nn.Module, batch: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(STEPS):
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("pin_memory", [True, False], ids=["pinned", "pageable"])
def test_offloaded_training_equals_a_single_process(*, pin_memory: bool) -> None:
    def fn(rank: int) -> tuple[list[float], dict[str, list[list[float]]], dict[str, int]]:
        mesh = init_device_mesh("npu", (NUM_RANKS,))
        model = Model()
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        losses = train(model, tokens()[2 * rank : 2 * rank + 2].to("npu"))
        parameters = {
            name: parameter.detach().to("npu").full_tensor().tolist()
            for name, parameter in model.named_parameters()
        }
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        return losses, parameters, simnpu.counters()

    def single_process(_rank: int) -> tuple[list[float], dict[str, list[list[float]]]]:
        reference = Model()
        losses = train(reference, tokens())
        return losses, {name: p.detach().tolist() for name, p in reference.named_parameters()}

    outcomes = run_ranks(fn, NUM_RANKS, backend="hccl")
    reference_losses, reference = run_ranks(single_process, 1, backend="none")[0]
    losses_per_step = zip(*(outcome[0] for outcome in outcomes), strict=True)
    mean_losses = [sum(losses) / NUM_RANKS for losses in losses_per_step]
    assert mean_losses == pytest.approx(reference_losses, rel=1e-5)
    assert reference_losses[-1] < reference_losses[0]
    for _losses, parameters, counters in outcomes:
        for name, expected in reference.items():
            torch.testing.assert_close(
                torch.tensor(parameters[name]), torch.tensor(expected), rtol=1e-4, atol=1e-5
            )
        # FSDP waits for every copy it makes; a false alarm here would make the counter useless.
        assert counters["early_rewrites"] == 0
        assert (counters["h2d_async"] > 0) == pin_memory


def test_torchs_own_clip_fails_with_offload_as_on_hardware() -> None:
    def fn(rank: int) -> str:
        model = nn.Linear(4, 4)
        fully_shard(
            model, mesh=init_device_mesh("npu", (NUM_RANKS,)), offload_policy=CPUOffloadPolicy()
        )
        model(torch.ones(2, 4, device="npu")).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return str(caught.value)

    expected = "No backend type associated with device type cpu"
    assert run_ranks(fn, NUM_RANKS, backend="hccl") == [expected] * NUM_RANKS


def test_mixed_precision_on_a_two_dimensional_mesh() -> None:
    def fn(rank: int) -> tuple[torch.dtype, str]:
        mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Linear(8, 8)
        fully_shard(
            model,
            mesh=mesh,
            offload_policy=CPUOffloadPolicy(),
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        )
        model(torch.ones(2, 8, device="npu")).float().sum().backward()
        gradient = model.weight.grad
        # Every row sums two samples of ones, averaged over ranks that all have the same.
        assert gradient.to_local().tolist() == [[2.0] * 8] * 4
        return gradient.dtype, gradient.to_local().device.type

    assert run_ranks(fn, 4, backend="hccl") == [(torch.float32, "cpu")] * 4


def test_dtensor_redistributes_over_hccl() -> None:
    def fn(rank: int) -> bool:
        mesh = init_device_mesh("npu", (NUM_RANKS,))
        full = torch.arange(12.0, device="npu").view(4, 3)
        sharded = distribute_tensor(full, mesh, [Shard(0)])
        assert sharded.to_local().shape == (2, 3)
        by_column = sharded.redistribute(mesh, [Shard(1)])
        doubled = (by_column * 2).redistribute(mesh, [Replicate()]).to_local()
        norm = torch.linalg.vector_norm(sharded)
        assert isinstance(norm, DTensor)
        assert norm.full_tensor().item() == pytest.approx(full.norm().item())
        return torch.equal(doubled, full * 2)

    assert run_ranks(fn, NUM_RANKS, backend="hccl") == [True] * NUM_RANKS


def test_eight_ranks_flatten_a_mesh() -> None:
    def fn(rank: int) -> float:
        mesh = init_device_mesh("npu", (2, 4), mesh_dim_names=("a", "b"))
        total = torch.ones(1, device="npu")
        dist.all_reduce(total, group=mesh["a", "b"]._flatten("flat").get_group())
        dist.all_reduce(total, group=mesh["a"].get_group())
        return total.item()

    assert run_ranks(fn, 8, backend="hccl") == [16.0] * 8
