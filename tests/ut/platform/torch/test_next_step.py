"""What a clip has left for an optimizer's next step: how long, and for which gradients."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from hyper_parallel import NormReducer, clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from tests.optimizers import assert_equal, divide_, has_lent, make, norm_of, refill_


@pytest.mark.parametrize("second", ["clips", "does not clip", "measures"])
def test_every_clip_replaces_what_was_left(second):
    """The step after the first clip is skipped."""
    params, optimizer = make()
    others, other_optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    max_norm = {"clips": 2.0, "does not clip": 1e6, "measures": math.inf}[second]
    result = NormReducer().clip_(params, max_norm, optimizer=optimizer)
    optimizer.step()
    if second == "clips":
        divide_(others, result.clip_coef.item())
    other_optimizer.step()
    assert_equal(params, others)


def test_clip_that_fails_leaves_nothing_for_the_step():
    params, optimizer = make()
    others, other_optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(params, -1.0, optimizer=optimizer)
    optimizer.step()
    other_optimizer.step()
    assert_equal(params, others)


def test_coefficient_is_for_one_step():
    params, optimizer = make()
    others, other_optimizer = make()
    coef = NormReducer().clip_(params, 1.0, optimizer=optimizer).clip_coef.item()
    divide_(others, coef)
    for _ in range(2):
        optimizer.step()
        other_optimizer.step()
    assert_equal(params, others)


def test_coefficient_of_a_clip_inside_the_closure_holds_for_that_step():
    params, optimizer = make()
    others, other_optimizer = make()
    coefs = []

    def closure():
        refill_(params, 7)
        coefs.append(NormReducer().clip_(params, 1.0, optimizer=optimizer).clip_coef.item())

    clip_grad_norm_(params, 0.5, optimizer=optimizer)  # replaced by the closure's
    optimizer.step(closure)
    refill_(others, 7)
    divide_(others, coefs[0])
    other_optimizer.step()
    assert_equal(params, others)
    assert not has_lent(optimizer)


def test_step_that_raised_does_not_scale_twice():
    params, optimizer = make()
    others, other_optimizer = make()

    def closure():
        raise RuntimeError("data ran out")

    coef = NormReducer().clip_(params, 1.0, optimizer=optimizer).clip_coef.item()
    with pytest.raises(RuntimeError, match="data ran out"):
        optimizer.step(closure)
    optimizer.step()
    divide_(others, coef)
    other_optimizer.step()
    assert_equal(params, others)
    assert not has_lent(optimizer)


def keep_count(optimizer, counts):
    """Add a hook of another purpose, which must be run all the same."""
    optimizer.register_step_pre_hook(lambda *_: counts.append("pre"))
    optimizer.register_step_post_hook(lambda *_: counts.append("post"))


@pytest.mark.parametrize("others", ["none", "before", "behind", "clipped before"])
def test_clip_in_a_pre_hook_of_the_optimizer_holds_for_that_step(others):
    """The first such clip came too late for the hook that it added itself: nothing was scaled."""
    params, optimizer = make()
    counts = []
    if others == "clipped before":
        clip_grad_norm_(params, math.inf, optimizer=optimizer)
    if others == "before":
        keep_count(optimizer, counts)
    optimizer.register_step_pre_hook(
        lambda *_: NormReducer().clip_(params, 1.0, optimizer=optimizer) and None
    )
    if others == "behind":
        keep_count(optimizer, counts)
    for step in range(3):
        refill_(params, step)
        assert norm_of(params) > 50
        optimizer.step()
        assert norm_of(params) == pytest.approx(1.0, rel=1e-6)
        assert not has_lent(optimizer)
    assert counts == (["pre", "post"] * 3 if others in ("before", "behind") else [])


def test_first_clip_in_a_closure_holds_for_that_step():
    params, optimizer = make()
    for step in range(2):
        optimizer.step(
            lambda step=step: (
                refill_(params, step),
                clip_grad_norm_(params, 1.0, optimizer=optimizer),
            )
        )
        assert norm_of(params) == pytest.approx(1.0, rel=1e-6)
        assert not has_lent(optimizer)


@pytest.mark.parametrize("scale_again", ["clip", "with norm", "another optimizer", "reducer"])
def test_gradients_that_a_step_is_to_scale_are_not_scaled_in_place_too(scale_again):
    """They would be scaled twice. Measuring them is no matter."""
    params, optimizer = make()
    before = [param.grad.clone() for param in params]
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    again = {
        "clip": lambda: clip_grad_norm_(params[:1], 1.0),
        "with norm": lambda: clip_grads_with_norm_(params, 1.0, torch.tensor(8.0)),
        "another optimizer": lambda: clip_grad_norm_(
            params, 1.0, optimizer=torch.optim.Adam(params, fused=True)
        ),
        "reducer": lambda: NormReducer().clip_(params, 1.0),
    }[scale_again]
    with pytest.raises(ValueError, match=r"next step of an AdamW is to scale parameters\[0\] of"):
        again()
    assert all(map(torch.equal, (param.grad for param in params), before))
    get_total_norm([param.grad for param in params])
    clip_grad_norm_(params, math.inf)
    optimizer.step()
    assert norm_of(params) == pytest.approx(1.0, rel=1e-6)
    again()


FAILING = {
    "max_norm": lambda params, options: clip_grad_norm_(params, -1.0, **options),
    "max_norm with norm": lambda params, options: clip_grads_with_norm_(
        params, -1.0, torch.tensor(8.0), **options
    ),
    "group": lambda params, options: clip_grad_norm_(params, 1.0, group="all", **options),
    "parameters": lambda params, options: clip_grad_norm_(None, 1.0, **options),
    "norm_type": lambda params, options: NormReducer().clip_(params, 1.0, math.nan, **options),
    "error_if_nonfinite": lambda params, options: (
        params[0].grad.fill_(math.inf),
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True, **options),
    ),
}


@pytest.mark.parametrize("fault", FAILING)
def test_no_clip_that_fails_leaves_anything_for_the_step(fault):
    params, optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
        FAILING[fault](params, {"optimizer": optimizer})
    grads = [param.grad.clone() for param in params]
    optimizer.step()
    assert all(map(torch.equal, (param.grad for param in params), grads))


def replace_one(params, _):
    params[1].grad = torch.ones(1000)


def add_group(_, optimizer):
    added = torch.nn.Parameter(torch.zeros(4))
    added.grad = torch.ones(4)
    optimizer.add_param_group({"params": [added]})


def write_one(params, _):
    """As `zero_grad(set_to_none=False)` and another backward pass do."""
    params[1].grad.zero_().add_(1.0)


OTHERS = {
    "one written": (write_one, r"\[0\]\['params'\]\[1\] of shape \(1000,\)\. Clip"),
    "one replaced": (replace_one, r"\[0\]\['params'\]\[1\] of shape \(1000,\)\. Clip"),
    "all replaced after a step left out": (lambda p, _: refill_(p, 5), r"\[0\]\['params'\]\[0\]"),
    "group added": (add_group, r"param_groups\[1\]\['params'\]\[0\] of shape \(4,\)\. Clip"),
}


@pytest.mark.parametrize("skip", [False, True], ids=["scale", "skip"])
@pytest.mark.parametrize("case", OTHERS)
def test_step_does_not_scale_gradients_that_were_not_clipped(case, skip):
    """In place they would not have been; the step cannot scale some only."""
    params, optimizer = make()
    if skip:
        params[2].grad[0] = math.nan
    NormReducer().clip_(params, 1.0, optimizer=optimizer, skip_nonfinite=skip)
    change, named = OTHERS[case]
    change(params, optimizer)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in everything]
    with pytest.raises(RuntimeError, match=named):
        optimizer.step()
    assert all(map(torch.equal, everything, before))
    assert not has_lent(optimizer)
    grads = [p.grad.clone() for p in everything]
    clip_grad_norm_(everything, math.inf, optimizer=optimizer)
    optimizer.step()
    assert all(torch.equal(p.grad, g) or skip for p, g in zip(everything, grads, strict=True))
    assert not any(map(torch.equal, everything[:1], before))


def test_step_without_some_of_the_clipped_gradients_scales_the_others():
    params, optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    params[0].grad = None
    optimizer.step()
    assert norm_of(params[1:]) == pytest.approx(math.sqrt(2 / 3), rel=0.05)
    refill_(params, 1)
    optimizer.step()  # for which nothing is left
    assert norm_of(params) > 50


def test_loaded_state_keeps_what_is_left():
    params, optimizer = make()
    optimizer.step()
    refill_(params, 1)
    state = copy.deepcopy(optimizer.state_dict())
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    optimizer.load_state_dict(state)
    optimizer.step()
    assert norm_of(params) == pytest.approx(1.0, rel=1e-6)


def test_copies_of_an_optimizer_are_left_nothing():
    """A copy or unpickled optimizer of torch 2.13 forgets that it can scale, and says so."""
    params, optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = copied.param_groups[0]["params"]
        refill_(own, 1)
        before = norm_of(own)
        with pytest.raises(TypeError, match=r"copied or unpickled.*load its state_dict"):
            clip_grad_norm_(own, 1.0, optimizer=copied)
        copied.step()
        assert norm_of(own) == before
    optimizer.step()
    assert norm_of(params) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_closure_that_makes_other_gradients_and_clips_none_is_an_error(by_keyword):
    """They would be scaled for those that were clipped before the step."""
    params, optimizer = make()
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    before = [param.detach().clone() for param in params]

    def closure():
        refill_(params, 1)
        return torch.tensor(7.0)

    arguments = ((), {"closure": closure}) if by_keyword else ((closure,), {})
    with pytest.raises(RuntimeError, match=r"there are others, .*: param_groups\[0\]"):
        optimizer.step(*arguments[0], **arguments[1])
    assert all(map(torch.equal, params, before))
    assert not has_lent(optimizer)
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0
    assert norm_of(params) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("where", ["outside", "pre-hook", "closure"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_step(where):
    """Its frames are not those of an optimizer's own step."""
    params, optimizer = make()

    def clip(*_):
        clip_grad_norm_(params, 1.0, optimizer=optimizer)

    if where == "pre-hook":
        optimizer.register_step_pre_hook(clip)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        refill_(params, number)
        if where == "outside":
            clip()
        step(*[clip] * (where == "closure"))
        assert norm_of(params) == pytest.approx(1.0, rel=1e-6)
        assert not has_lent(optimizer)
