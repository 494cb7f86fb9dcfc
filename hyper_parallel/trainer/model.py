"""A decoder-only mixture-of-experts transformer, written as for one process.

Words, with their shapes:
    hidden  [batch, seq, dim], what flows from layer to layer
    tokens  [num_tokens, dim], hidden with batch and sequence flattened
    rows    [num_tokens * top_k, dim], one per token and chosen expert, sorted by expert
    counts  [num_experts] int64 on the host, rows per expert
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.trainer.config import ModelConfig

__all__ = ["Attention", "Block", "Dispatch", "Experts", "MixtureOfExperts", "Mlp", "Transformer"]


class Dispatch:
    """How tokens reach their experts; here both are in this process."""

    def split(self, tokens: Tensor) -> Tensor:
        """Return the tokens that this process sends to experts (dim 0)."""
        return tokens

    def merge(self, tokens: Tensor) -> Tensor:
        """Undo split."""
        return tokens

    def run_experts(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts make of the rows, in the same order."""
        output: Tensor = experts(rows, counts.tolist())
        return output


class Experts(nn.Module):
    """Feed-forward networks whose weights are stacked, so that dim 0 can be sharded.

    Attributes:
        gradient_factor: What the weights' gradients are multiplied by, before FSDP2 averages them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gradient_factor = 1.0
        num_experts, dim, expert_dim = config.num_experts, config.dim, config.expert_dim
        self.up = nn.Parameter(torch.randn(num_experts, dim, expert_dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, expert_dim, dim) * expert_dim**-0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply expert i to its counts[i] rows; an expert without rows gets a zero gradient."""
        weights = zip(self._local(self.up).unbind(), self._local(self.down).unbind(), strict=True)
        parts = zip(torch.split(rows, counts), weights, strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, (up, down) in parts])

    def _local(self, weight: Tensor) -> Tensor:
        """Return this rank's experts: under expert parallelism the weight is a DTensor."""
        if not isinstance(weight, DTensor):
            return weight
        local: Tensor = weight.to_local()
        if local.requires_grad:  # not so in evaluation
            local.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * self.gradient_factor
            )
        return local


class Mlp(nn.Module):
    """The dense feed-forward part that every token passes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.mlp_dim)
        self.down = nn.Linear(config.mlp_dim, config.dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        output: Tensor = self.down(F.gelu(self.up(hidden)))
        return output


class Attention(nn.Module):
    """Causal self-attention; a process may hold some of the heads only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        query = self._heads(self.query(hidden))
        key, value = self._heads(self.key(hidden)), self._heads(self.value(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        """[batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]."""
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)


class MixtureOfExperts(nn.Module):
    """Each token passes the top-k experts that the router chooses, weighted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.dispatch = Dispatch()

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        tokens = hidden.flatten(0, -2)
        probabilities = self.router(tokens).softmax(-1)
        gates, chosen = probabilities.topk(self.top_k, dim=-1)  # both [num_tokens, top_k]
        gates = gates / gates.sum(-1, keepdim=True)
        split = self.dispatch.split
        output = self._through_experts(split(tokens), split(gates), split(chosen))
        return self.dispatch.merge(output).view_as(hidden)

    def _through_experts(self, tokens: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        order = torch.argsort(chosen.flatten(), stable=True)
        # Sync: one small copy to the host, since rows are cut by host numbers below.
        counts = torch.bincount(chosen.flatten().cpu(), minlength=self.num_experts)
        repeated = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        rows = repeated.index_select(0, order)
        rows = self.dispatch.run_experts(self.experts, rows, counts)
        by_token = rows.index_select(0, torch.argsort(order)).view(*chosen.shape, -1)
        return (by_token * gates.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    """One layer: attention, then the dense MLP beside the routed experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = Mlp(config)
        self.moe = MixtureOfExperts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        normed = self.mlp_norm(hidden)
        output: Tensor = hidden + self.mlp(normed) + self.moe(normed)
        return output


class Transformer(nn.Module):
    """Token ids to logits over the next token."""

    def __init__(self, config: ModelConfig, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, config.dim)
        self.position_embedding = nn.Embedding(seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, vocab_size]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
