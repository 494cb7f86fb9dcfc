"""Inputs from public bug reports that need no second rank, with the right answers.

Each test names its report.
"""

import math

import pytest
import torch

from hyper_parallel import NormReducer, clip_grad_norm_, get_total_norm
from tests.sharding import (
    parameter,
)


def test_error_if_nonfinite_without_a_group():
    param = parameter(torch.tensor([1.0, math.inf]))
    with pytest.raises(RuntimeError, match=r"parameters\[0\] of shape \(2,\) \(0 NaN, 1 inf\)"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    assert param.grad.tolist() == [1.0, math.inf]


def test_error_if_nonfinite_when_finite_gradients_have_an_infinite_norm():
    param = parameter(torch.full((100,), 3e38))
    with pytest.raises(RuntimeError, match="norm is beyond torch"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([param], math.inf).isinf()


def test_huge_gradients_have_a_finite_norm():
    """pytorch#46849: float32 squares overflow."""
    param = parameter(torch.full((100,), 1e20))
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(1e21, rel=1e-6)
    assert param.grad.tolist() == pytest.approx([0.1] * 100, rel=1e-6)


def test_tiny_gradients_have_a_norm():
    param = parameter(torch.full((100,), 1e-25))
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(1e-24, rel=1e-6)


def test_bfloat16_norm_is_not_rounded_to_bfloat16():
    """torchtitan#4135: 528."""
    large, small = (torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 16.0))
    params = [parameter(large), *(parameter(small) for _ in range(16))]
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(527.758, abs=5e-4)


def test_float16_norm_beyond_float16():
    """fairscale#263, burn#5699: inf."""
    param = parameter(torch.full((65536,), 300.0, dtype=torch.float16))
    assert clip_grad_norm_([param], 1.0).item() == 76800.0


def test_gradients_of_a_large_shard_are_really_scaled():
    """transformers#46113; its memory is in test_partial_norms.py."""
    param = parameter(torch.ones(1 << 20))
    assert clip_grad_norm_([param], 1.0).item() == 1024.0
    assert param.grad.unique().tolist() == pytest.approx([1 / 1024], rel=1e-6)


def test_dtypes_mix_in_one_list():
    """Megatron-LM#7338: fp32 [3] + bf16 [4]."""
    params = [parameter(torch.tensor([3.0])), parameter(torch.tensor([4.0]).bfloat16())]
    assert clip_grad_norm_(params, 1.0).item() == 5.0


def test_frozen_parameter_is_skipped():
    """fairscale#1167, prismatic-vlms#35."""
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    assert clip_grad_norm_([frozen, parameter(torch.tensor([3.0, 4.0]))], 1.0).item() == 5.0


def test_optimizer_groups_are_clipped_together():
    """OLMo#261, transformers#614: the norm is global unless asked otherwise."""
    groups = [{"params": [parameter(torch.tensor([value]))]} for value in (3.0, 4.0)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    clip_grad_norm_(params, 1.0)
    assert [p.grad.item() for p in params] == pytest.approx([0.6, 0.8], abs=1e-6)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_steps_by_the_clipped_gradient(make):
    """prime-rl#3196: the logged norm was clipped, the step was not."""
    clipped, given = (parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    clip_grad_norm_([clipped], 1.0)
    given.grad = clipped.grad.clone()
    assert given.grad.norm().item() == pytest.approx(1.0, abs=1e-6)
    for param in (clipped, given):
        make([param], lr=1.0).step()
    assert torch.equal(clipped, given)


def test_tiny_coefficient_is_applied():
    """Megatron-LM#5395: norm 5e7."""
    param = parameter(torch.tensor([3e7, 4e7]))
    result = NormReducer().clip_([param], 1.0)
    assert result.total_norm.item() == 5e7
    assert result.clip_coef.item() == pytest.approx(2e-8, rel=1e-6)
    assert param.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_parameter_listed_twice_counts_and_is_scaled_once():
    """Found while surveying."""
    param = parameter(torch.tensor([3.0, 4.0]))
    assert get_total_norm([param.grad, param.grad]).item() == 5.0
    assert clip_grad_norm_([param, param], 1.0).item() == 5.0
    assert param.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-6)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_impossible_max_norm_is_refused(max_norm):
    """Found while surveying: a negative one turns the signs."""
    param = parameter(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([param], max_norm)
    assert param.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("norm_type", [-2.0, math.nan])
def test_impossible_norm_type_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([parameter(torch.ones(2))], 1.0, norm_type)


def test_complex_gradient():
    """Found while surveying."""
    param = parameter(torch.tensor([3 + 4j]))
    assert clip_grad_norm_([param], 1.0).item() == 5.0
    assert abs(param.grad.item()) == pytest.approx(1.0, abs=1e-6)


def test_norm_type_by_name():
    """torch takes 'inf', too."""
    assert get_total_norm([torch.tensor([3.0, -4.0])], "inf").item() == 4.0
