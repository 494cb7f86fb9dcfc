import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows

from hyper_parallel.trainer.config import ModelConfig
from hyper_parallel.trainer.model import MixtureOfExperts, Transformer
from tests.ranks import run_ranks

SMALL = ModelConfig(dim=8, num_heads=2, mlp_dim=12, num_experts=4, expert_dim=6, top_k=2)


def test_mixture_equals_a_loop_over_tokens():
    torch.manual_seed(0)
    moe = MixtureOfExperts(SMALL).double()
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    probabilities = moe.router(hidden).softmax(-1)
    expected = torch.zeros_like(hidden)
    for where in ((b, t) for b in range(2) for t in range(5)):
        best = probabilities[where].argsort(descending=True)[:2]
        for expert in best:
            gate = probabilities[where][expert] / probabilities[where][best].sum()
            inner = F.gelu(hidden[where] @ moe.experts.up[expert])
            expected[where] += gate * (inner @ moe.experts.down[expert])
    torch.testing.assert_close(moe(hidden), expected, rtol=1e-12, atol=1e-12)


def experts_with_gradient(rank: int) -> list[bool]:
    torch.manual_seed(0)
    moe = MixtureOfExperts(SMALL)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(4, 8))
    hidden = torch.zeros(1, 3, 8)
    hidden[..., :2] = 5.0  # the router sees experts 0 and 1 alone
    moe(hidden).sum().backward()
    return (moe.experts.up.grad.flatten(1).norm(dim=1) > 0).tolist()


def test_expert_without_tokens_gets_a_zero_gradient():
    # In a process of its own: a backward here would start torch's autograd threads before the
    # simulated NPU exists, and every rank forked later would fail in its own backward.
    (used,) = run_ranks(experts_with_gradient, 1, backend="none")
    assert used == [True, True, False, False]


@pytest.mark.parametrize("position", [0, 3, 6])
def test_logits_depend_on_no_later_byte(position):
    torch.manual_seed(0)
    model = Transformer(SMALL, vocab_size=16, seq_len=8)
    ids = torch.randint(0, 16, (1, 8))
    later = ids.clone()
    later[0, position + 1 :] = (later[0, position + 1 :] + 1) % 16
    before, after = model(ids)[0], model(later)[0]
    torch.testing.assert_close(before[: position + 1], after[: position + 1])
    assert not torch.equal(before[position + 1 :], after[position + 1 :])
