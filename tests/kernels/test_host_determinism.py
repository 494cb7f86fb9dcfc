"""Results depend neither on the number of threads nor on the instruction set, bit for bit."""

import math

import pytest
import torch

from hyper_parallel.kernels import host
from tests.kernels.host_inputs import (
    CHUNK_SIZES,
    DTYPES,
    EXACT_DTYPES,
    INSTRUCTION_SETS,
    SIZES,
    any_bits,
    at_offset,
    normal,
    running,
)


def inputs(dtypes):
    tensors = []
    for dtype in dtypes:
        tensors += [at_offset(normal(n, dtype, seed=n), n % 7) for n in SIZES + CHUNK_SIZES]
        tensors += [any_bits(5000, dtype, seed=1, finite=True), normal(700_001, dtype)]
        tensors.append(any_bits(70_000, dtype, seed=2, finite=False))
    return tensors


def every_way():
    for isa in INSTRUCTION_SETS:
        for num_threads in range(1, 9):
            yield isa, num_threads


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf])
def test_norms_have_the_same_bits(p):
    tensors = inputs(DTYPES)
    seen = set()
    ways = list(every_way()) if p == 2.0 else [(isa, 3) for isa in INSTRUCTION_SETS] + [("auto", 1)]
    for isa, num_threads in ways:
        with running(isa, num_threads):
            norms = host.partial_norms(tensors, p)
        # As bytes, in which NaN equals itself.
        seen.add(bytes(norms._ints))
    assert len(seen) == 1


def test_exact_sums_have_the_same_bits():
    tensors = inputs(EXACT_DTYPES)
    seen = set()
    for isa, num_threads in every_way():
        with running(isa, num_threads):
            seen.add(tuple(host.exact_sums_of_squares(tensors)))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_tensors_have_the_same_bits(dtype):
    tensors = [any_bits(1003, dtype, seed=3, finite=True), normal(300_001, dtype)]
    seen = set()
    for isa, num_threads in every_way():
        scaled = [tensor.clone() for tensor in tensors]
        with running(isa, num_threads):
            host.scale_(scaled, 0.3)
        seen.add(tuple(bytes(t.view(torch.uint8).numpy()) for t in scaled))
    assert len(seen) == 1


def test_every_instruction_set_of_this_processor_is_tried():
    assert INSTRUCTION_SETS[-1] == "scalar"
    assert len(INSTRUCTION_SETS) > 1, "only scalar code: are there no vectors here?"
