"""Parameters with gradients, their fused optimizers, and what a step is to make of them."""

from __future__ import annotations

import math

import pytest
import torch

__all__ = ["assert_equal", "divide_", "fused", "has_lent", "make", "norm_of", "refill_"]

_FUSED = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]
fused = pytest.mark.parametrize("kind", _FUSED, ids=lambda kind: kind.__name__)
"""Run a test with each of the optimizers that a GradScaler drives."""


def make(kind=torch.optim.AdamW, dtype=torch.float32, seed=0, num=3):
    """Parameters with gradients of norm about 50 each, and a fused optimizer of them."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for _ in range(num):
        param = torch.nn.Parameter(torch.randn(1000, generator=generator).to(dtype))
        param.grad = (torch.randn(1000, generator=generator) * 1.5).to(dtype)
        params.append(param)
    return params, kind(params, lr=1e-2, fused=True)


def divide_(params, coef):
    """Scale gradients as the step is documented to."""
    divisor = torch.tensor(1.0 / coef, dtype=torch.float32)
    for param in params:
        param.grad = (param.grad.float() / divisor).to(param.dtype)


def refill_(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(1000, generator=generator) * 1.5).to(param.dtype)


def assert_equal(params, others):
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(param.grad, other.grad)


def has_lent(optimizer):
    return [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]


def norm_of(params):
    return math.sqrt(math.fsum(x * x for p in params for x in p.grad.double().tolist()))
