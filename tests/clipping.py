"""A clip that is expected to fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hyper_parallel import clip_grad_norm_
from tests.sharding import local_grad


def error_of(params: Sequence[torch.nn.Parameter], *args: Any, **options: Any) -> Exception:
    """Clip, expect an error and unchanged gradients; return the error."""
    before = [None if p.grad is None else local_grad(p).clone() for p in params]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        clip_grad_norm_(params, *args, **options)
    for param, grad in zip(params, before, strict=True):
        assert grad is None or torch.equal(local_grad(param), grad)
    return raised.value
