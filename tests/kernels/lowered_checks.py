"""What code lowered for Ascend must compute on the CPU; `tests.kernels.ascend` runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hyper_parallel.kernels import triton as kernels
from tests.kernels.host_inputs import any_bits, normal, subnormal
from tests.kernels.triton_checks import (
    DTYPES,
    ERROR_VOTE,
    HEADER_NUMEL,
    SIZES,
    agreed_header,
    amid,
    check_encode,
    check_finish,
    check_huge_votes,
    check_partial_norms,
    check_scale,
    host_lane,
)


def run_all() -> Iterator[str]:
    """Run them, and yield the name of each that passed."""
    for dtype in DTYPES:
        tensors = [amid(math.nan, normal(numel, dtype, seed=numel), numel % 3) for numel in SIZES]
        tensors.append(any_bits(5000, dtype, 1, finite=True))
        tensors.append(subnormal(300, dtype, seed=2))
        for power in (2, 1, 0):
            check_partial_norms(kernels, tensors, power)
            yield f"partial_norms-p{power}-{dtype}"
        for special in (math.nan, math.inf):
            tensors[-3][20_000] = special
            check_partial_norms(kernels, tensors, 2)
            yield f"partial_norms-{special}-{dtype}"
        for coefficient in (0.3, 1.0, math.nan):
            others = [amid(7.0, tensor, 1) for tensor in tensors]
            check_scale(kernels, others, coefficient)
            yield f"scale-{coefficient}-{dtype}"
    huge_and_tiny = [torch.full((100,), 1e20), torch.full((100,), 1e-25)]
    check_partial_norms(kernels, huge_and_tiny, 2)
    yield "partial_norms-1e20-1e-25"
    for digit_bits in (23, 17, 10):
        incoming = [host_lane(value, digit_bits, 1, 2) for value in (1.0 / 3, 1e300, 2.5)]
        lanes = [[normal(3000, torch.float32)], huge_and_tiny]
        for power in (2, 1):
            check_encode(kernels, lanes, power, digit_bits, incoming)
            yield f"encode-p{power}-w{digit_bits}"
            for max_norm in (1.0, math.inf):
                check_finish(kernels, [[*lane[:1], 0.0, *lane[2:]] for lane in incoming], power,
                             digit_bits, max_norm)  # fmt: skip
                finite = [[0.0, 0.0, *lane[2:]] for lane in incoming]
                check_finish(kernels, finite, power, digit_bits, max_norm)
                check_finish(kernels, finite[::2], power, digit_bits, max_norm)
            for place in (0, ERROR_VOTE, HEADER_NUMEL - 1):
                header = agreed_header(power, digit_bits)
                header[place] += 1.0
                check_finish(
                    kernels, finite, power, digit_bits, 1.0, header=header, is_agreed=False
                )
            yield f"finish-p{power}-w{digit_bits}"
    check_huge_votes(kernels)
    yield "encode-huge-votes"
    maxima = [host_lane(value, 17, 0, 1, math.inf) for value in (0.5, 100.0, 2.0**127)]
    check_encode(kernels, lanes, 0, 17, maxima)
    check_finish(kernels, [[0.0, *lane[1:]] for lane in maxima], 0, 17, 1.0)
    yield "extrema"
