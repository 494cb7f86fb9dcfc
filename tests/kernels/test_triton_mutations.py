"""The checks of the device kernels catch kernels that are wrong.

Each case changes one line of a copy of the kernels, as a slip would, and names the check that must
fail. The copy as it is passes all of them.
"""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hyper_parallel.kernels import triton as original
from tests.kernels.host_inputs import normal
from tests.kernels.triton_checks import (
    ERROR_VOTE,
    HEADER_NUMEL,
    NUM_VOTES,
    agreed_header,
    amid,
    check_encode,
    check_finish,
    check_huge_votes,
    check_partial_norms,
    check_scale,
    host_lane,
)

pytestmark = pytest.mark.triton

LANES = [host_lane(value, 17) for value in (0.3, 5.0, 1e9)]


def tails(kernels: ModuleType) -> None:
    tensors = [amid(math.nan, normal(n, torch.float32, seed=n), 1) for n in (1, 4097, 5000)]
    check_partial_norms(kernels, tensors, 2)


def nan_in_a_tensor(kernels: ModuleType) -> None:
    tensor = normal(5000, torch.float32)
    tensor[4500] = math.nan
    check_partial_norms(kernels, [tensor], 2)


def inf_in_a_tensor(kernels: ModuleType) -> None:
    check_partial_norms(kernels, [torch.tensor([1.0, -math.inf])], 2)


def huge_and_tiny(kernels: ModuleType) -> None:
    check_partial_norms(kernels, [torch.full((50,), 1e25), torch.full((50,), 1e-30)], 2)


def spike(kernels: ModuleType) -> None:
    tensor = normal(4096, torch.float32)
    tensor[5] = 1e3
    check_partial_norms(kernels, [tensor], 2)


def mixed_dtypes(kernels: ModuleType) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    tensors = [normal(100 + i, dtypes[i % 2], seed=i) for i in range(4)]
    check_partial_norms(kernels, tensors, 2)


def lanes(kernels: ModuleType) -> None:
    tensors = [normal(3000, torch.float32), torch.tensor([0.1])]
    check_encode(kernels, [tensors[:1], tensors[1:]], 2, 17, LANES)


def votes(kernels: ModuleType) -> None:
    bad = [torch.tensor([math.nan]), torch.tensor([1.0])]
    check_encode(kernels, [bad[:1], bad[1:]], 2, 17, LANES)


def norm(kernels: ModuleType) -> None:
    near_tie = ((1.0 + 2.0**-24) * (1.0 + 2.0**-44)) ** 2
    for value in (near_tie, near_tie * 2.0**16, 1e-3, 1e-9):
        check_finish(kernels, [host_lane(value, 17)], 2, 17, 1e-4)


def subnormal_norm(kernels: ModuleType) -> None:
    # 1 + 2^-25 halves of the last place: to 24 bits a tie.
    value = 2.0**-150 * (1.0 + 2.0**-25)
    check_finish(kernels, [host_lane(value, 17, norm_type=1.0)], 1, 17, 1.0)


def measured_only(kernels: ModuleType) -> None:
    check_finish(kernels, [LANES[0]], 2, 17, math.inf)


def nan_in_a_lane(kernels: ModuleType) -> None:
    check_finish(kernels, [[1.0, *LANES[0][1:]]], 2, 17, 1.0)


def dissent(kernels: ModuleType) -> None:
    for place in (0, NUM_VOTES + 1, HEADER_NUMEL - 1):
        header = agreed_header(2, 17)
        header[place] -= 1.0
        check_finish(kernels, LANES, 2, 17, 1.0, header=header, is_agreed=False)


def failure(kernels: ModuleType) -> None:
    header = agreed_header(2, 17)
    header[ERROR_VOTE] = 1.0
    check_finish(kernels, LANES, 2, 17, 1.0, header=header, is_agreed=False)


def scaling(kernels: ModuleType) -> None:
    tensors = [amid(7.0, normal(n, torch.bfloat16, seed=n), 1) for n in (3, 4097)]
    check_scale(kernels, tensors, 0.3)


CHECKS: list[Callable[[ModuleType], None]] = [
    tails, nan_in_a_tensor, inf_in_a_tensor, huge_and_tiny, spike, mixed_dtypes, lanes, votes,
    check_huge_votes, norm, subnormal_norm, measured_only, nan_in_a_lane, dissent, failure, scaling,
]  # fmt: skip

MUTATIONS = {
    "tail one too short": (
        "partial_norms", "element < numel - start", "element < numel - start - 1", tails),
    "tail one too long": (
        "partial_norms", "element < numel - start", "element <= numel - start", tails),
    "last block dropped": (
        "partial_norms", "range(0, numel, BLOCK)", "range(0, numel - BLOCK + 1, BLOCK)", tails),
    "NaN dropped": (
        "partial_norms", "bits > INFINITY, 1.0, 0.0", "bits > INFINITY, 0.0, 0.0",
        nan_in_a_tensor),
    "NaN taken for a number": (
        "partial_norms", "if most < INFINITY:", "if most != INFINITY:", nan_in_a_tensor),
    "infinity dropped": (
        "partial_norms", "bits == INFINITY, 1.0", "bits == INFINITY, 0.0", inf_in_a_tensor),
    "row of another dtype's tensor": (
        "partial_norms", "24 * row + column", "24 * segment + column", mixed_dtypes),
    "distance in a segment lost": (
        "partial_norms", "base_ptr + offset + start", "base_ptr + start", mixed_dtypes),
    "huge not scaled": (
        "partial_norms", "tl.where(group == 1, 1.0, 2.0**-90)", "1.0", huge_and_tiny),
    "low halves dropped": (
        "partial_norms", "coarse, medium, fine, True, True)", "coarse, medium, fine, True, False)",
        spike),
    "a level too coarse": (
        "partial_norms", "2 * LOG2_BLOCK - 32", "2 * LOG2_BLOCK - 10", spike),
    "pair not renormalised": (
        "arithmetic", "return high, low - (high - total)", "return high, low", tails),
    "carry dropped": (
        "encode", "+ carry_out(below, DIGIT_BITS)", "", lanes),
    "digit off by one": (
        "encode", "- 150 + exponent", "- 149 + exponent", lanes),
    "incoming lane dropped": (
        "encode", "digits = incoming.to(tl.int32)", "digits = tl.zeros((BLOCK,), tl.int32)", lanes),
    "rows of the lane before": (
        "encode", "ranges_ptr + 2 * lane)", "ranges_ptr + 0 * lane)", lanes),
    "vote not cast": (
        "encode", "num_nan + num_inf > 0.0", "num_inf > 0.0", votes),
    "always voted huge": (
        "encode", "largest > HUGE, 1.0, 0.0", "largest > HUGE, 1.0, 1.0", check_huge_votes),
    "never voted huge": (
        "encode", "largest > HUGE, 1.0, 0.0", "largest > HUGE, 0.0, 0.0", check_huge_votes),
    "voted huge at the bound": (
        "encode", "largest > HUGE", "largest >= HUGE", check_huge_votes),
    "voted huge far beyond the bound only": (
        "encode", "tl.constexpr(2.0**75)", "tl.constexpr(2.0**76)", check_huge_votes),
    "group of huge blocks taken for ordinary on the host": (
        "rows", "(75, 0, -90)", "(75, 0, 0)", huge_and_tiny),
    "low halves dropped on the host": (
        "rows", "_LOWS = slice(8, 11)", "_LOWS = slice(11, 14)", tails),
    "root not refined": (
        "finish", "rest / (safe + safe)", "0.0 * rest", norm),
    "subnormal rounded twice": (
        "finish", "<= -126, kept, rounded", "<= -126, rounded, rounded", subnormal_norm),
    "measured only, yet scaled": (
        "finish", "max_norm < 0.0, 1.0", "max_norm == 7.0, 1.0", measured_only),
    "odd exponent forgotten": (
        "finish", "tl.where(odd == 1, 2.0, 1.0)", "1.0", norm),
    "epsilon forgotten": (
        "finish", "reciprocal(norm + 1e-6)", "reciprocal(norm)", norm),
    "NaN count ignored": (
        "finish", 'num_nan != 0.0, float("nan"), norm', "num_nan != 0.0, norm, norm",
        nan_in_a_lane),
    "header's last place not compared": (
        "finish", "within = index < HEADER_NUMEL", "within = index < HEADER_NUMEL - 1", dissent),
    "header's first place not compared": (
        "finish", "votes = (index > 0)", "votes = (index >= 0)", dissent),
    "a place taken for a vote": (
        "finish", "(index <= NUM_VOTES)", "(index <= NUM_VOTES + 1)", dissent),
    "votes compared": (
        "finish", "(index <= NUM_VOTES)", "(index < NUM_VOTES)", norm),
    "ranks not counted": (
        "finish", "own * NUM_ADDENDS", "own", norm),
    "failure not read": (
        "finish", "tl.where(index == ERROR_VOTE, 0.0, expected)", "expected", failure),
    "scaled in spite of dissent": (
        "finish", "tl.where(agreed, coefficient, 1.0)", "coefficient", dissent),
    "scale one too long": (
        "scale", "element < numel - start", "element <= numel - start", scaling),
    "rounded before multiplying": (
        "scale", "x.to(tl.float32) * coefficient", "x * coefficient.to(x.dtype)", scaling),
}  # fmt: skip


@pytest.fixture
def copy_of_kernels(tmp_path, monkeypatch):
    """Return a function that imports a copy of the kernels with one text replaced by another."""

    def make(module: str = "", old: str = "", new: str = "") -> ModuleType:
        name = f"kernels_of_{tmp_path.name}"
        folder = tmp_path / name
        shutil.copytree(Path(original.__file__).parent, folder)
        if module:
            source = folder / f"{module}.py"
            text = source.read_text()
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {module}"
            source.write_text(text.replace(old, new))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in [name for name in sys.modules if name.startswith("kernels_of_")]:
        del sys.modules[name]


def test_copy_passes_every_check(copy_of_kernels):
    kernels = copy_of_kernels()
    for check in CHECKS:
        check(kernels)


@pytest.mark.parametrize("slip", MUTATIONS)
def test_slip_is_caught(slip, copy_of_kernels):
    module, old, new, check = MUTATIONS[slip]
    kernels = copy_of_kernels(module, old, new)
    with pytest.raises(AssertionError):
        check(kernels)


def test_readme_counts_the_slips():
    readme = Path(__file__).resolve().parents[2] / "README.md"
    assert f"| {len(MUTATIONS)} slips in a line each" in readme.read_text()
