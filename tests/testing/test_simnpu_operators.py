"""Operators on the simulated NPU give what the CPU gives, without code of their own."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from hyper_parallel.testing import simnpu
from tests.ranks import run_ranks

pytestmark = pytest.mark.simnpu

Op = Callable[[torch.Tensor], torch.Tensor]


def in_child(fn: Callable[[], object]) -> object:
    """Run `fn` in a forked process: torch forbids a process that ran backward to fork ranks."""
    return run_ranks(lambda _rank: fn(), 1, backend="none")[0]


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, 2, 4, 8)
    return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def embedding(x: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.tensor([1, 3], device=x.device), x)


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, torch.arange(8, device=x.device))


def index_add(x: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([0, 0, 2], device=x.device)
    return torch.zeros_like(x).index_add(0, rows, x[:3])


def scatter_add(x: torch.Tensor) -> torch.Tensor:
    index = torch.zeros(8, 8, dtype=torch.long, device=x.device)
    return torch.zeros_like(x).scatter_add(0, index, x)


def convolution(x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x.view(1, 1, 8, 8), x[:3, :3].reshape(1, 1, 3, 3), x[0, :1])


OPS = {
    "matmul": lambda x: x @ x,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "rms_norm": lambda x: functional.rms_norm(x, (8,)),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "attention": attention,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "topk": lambda x: x.topk(3).values,
    "sort": lambda x: x.sort().values,
    "argsort-gather": lambda x: x.gather(1, x.argsort(1)),
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 0], device=x.device)),
    "index_add": index_add,
    "scatter_add": scatter_add,
    "index-by-host-tensor": lambda x: x[torch.tensor([1, 2])],
    "mask": lambda x: x[x > 0].sum(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cumsum": lambda x: x.cumsum(0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "convolution": convolution,
    "complex-conj": lambda x: torch.view_as_real(torch.complex(x, 2 * x).conj() * 1j),
    "norm": torch.linalg.vector_norm,
    "cat-split": lambda x: torch.cat(list(x.split(3))[::-1]),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "scalar-tensor": lambda x: x * torch.tensor(3.0),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_forward_and_backward_match_the_cpu(op: Op) -> None:
    def forward_and_backward(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.arange(64.0).mul(1.7).sin().view(8, 8).to(device).requires_grad_()
        result = op(leaf)
        assert result.device.type == device
        # Uneven weights: the sum of what a norm or softmax returns has gradient 0.
        weights = torch.arange(float(result.numel())).mul(0.7).cos().view(result.shape)
        (result * weights.to(device)).sum().backward()
        return result.detach().cpu(), leaf.grad.cpu()

    def compare() -> None:
        # Not bitwise: attention and norms are composed differently on the two.
        torch.testing.assert_close(forward_and_backward("npu"), forward_and_backward("cpu"))

    in_child(compare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes_match_the_cpu(dtype: torch.dtype) -> None:
    source = torch.linspace(-2, 2, 64).view(8, 8).to(dtype)
    assert torch.equal((source.to("npu") @ source.to("npu")).cpu(), source @ source)


def test_integer_ops_match_the_cpu() -> None:
    source = torch.tensor([3, 1, 1, 0, 3, 3])
    assert source.to("npu").bincount().tolist() == source.bincount().tolist()
    assert (source.to("npu") << 2).tolist() == (source << 2).tolist()


def test_conversion_during_a_copy() -> None:
    assert torch.tensor([1.5, -2.5]).to("npu", torch.int32).tolist() == [1, -2]
    host = torch.zeros(2, 2)
    host.copy_(torch.tensor([[1, 2], [3, 4]], device="npu").t())
    assert host.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_mixing_devices_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="npu") + torch.ones(2)


def optimise(device: str, **options: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        model(torch.ones(2, 4, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str
)
def test_adamw_matches_the_cpu(options: dict[str, bool]) -> None:
    def compare() -> None:
        torch.testing.assert_close(optimise("npu", **options), optimise("cpu", **options))

    in_child(compare)


def test_autocast_lowers_matmuls_and_keeps_sums() -> None:
    x = torch.ones(4, 4, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).sum().dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_seed_repeats_random_numbers() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.randn(4, device="npu")

    assert torch.equal(draw(), draw())
    state = torch.npu.get_rng_state()
    first = torch.randn(4, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="npu"), first)


def test_generator_is_independent_of_the_default_one() -> None:
    draws = []
    for _ in range(2):
        generator = torch.Generator(device="npu").manual_seed(3)
        draws.append(torch.rand(4, device="npu", generator=generator).tolist())
        torch.rand(1, device="npu")
    assert draws[0] == draws[1]


def test_saved_tensor_loads_onto_the_device(tmp_path: object) -> None:
    torch.save(torch.arange(3, device="npu"), f"{tmp_path}/tensor.pt")
    loaded = torch.load(f"{tmp_path}/tensor.pt")
    assert loaded.device.type == "npu"
    assert loaded.tolist() == [0, 1, 2]


def test_checkpointed_module_repeats_its_dropout() -> None:
    def checkpoint() -> bool:
        leaf = torch.ones(64, device="npu", requires_grad=True)
        result = torch.utils.checkpoint.checkpoint(
            lambda x: functional.dropout(x, 0.5) * x, leaf, use_reentrant=False
        )
        result.sum().backward()
        return torch.equal(leaf.grad, 2 * result)

    assert in_child(checkpoint)


def test_host_parameter_can_be_pointed_at_device_memory() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.data = torch.full((2,), 3.0, device="npu")
    assert parameter.device.type == "npu"
    assert parameter.tolist() == [3.0, 3.0]


def test_is_installed() -> None:
    assert simnpu.is_installed()
    assert simnpu.install()
    assert torch.accelerator.current_accelerator() == torch.device("npu")


def test_views_in_inference_mode_are_what_the_tensor_is() -> None:
    ordinary = torch.arange(6.0, device="npu")
    with torch.inference_mode():
        made_there = torch.arange(6.0, device="npu")
        views = [ordinary[2:], ordinary.view(2, 3), ordinary.narrow(0, 1, 2)]
        assert not any(view.is_inference() for view in views)
        assert made_there[2:].is_inference()
        assert (ordinary * 2).is_inference()
    views[0].add_(1)
    assert ordinary.tolist() == [0, 1, 3, 4, 5, 6]
