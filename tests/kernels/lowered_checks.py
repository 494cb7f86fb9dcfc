"""What code lowered for Ascend must compute on the CPU; `tests.kernels.ascend` runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hyper_parallel.kernels import triton as kernels
from hyper_parallel.platform.torch.wire_format import PartialNorm, WireFormat
from tests.kernels.host_inputs import any_bits, normal, subnormal
from tests.kernels.triton_checks import (
    DTYPES,
    ERROR_VOTE,
    HEADER_NUMEL,
    agreed_header,
    amid,
    check_encode,
    check_finish,
    check_partial_norms,
    check_scale,
)

SIZES = [0, 1, 7, 4095, 4096, 4097, 30_005]


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
        wire = WireFormat(1 << (24 - digit_bits), 2.0)
        values = (1.0 / 3, 1e300, 2.5)
        incoming = [wire.encode(PartialNorm(value, 1, 2)).tolist() for value in values]
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
    width = 2 + -(-2098 // 17)
    maxima = [[0.0, 1.0, value] + [0.0] * (width - 3) for value in (0.5, 100.0, 2.0**127)]
    check_encode(kernels, lanes, 0, 17, maxima)
    check_finish(kernels, [[0.0, *lane[1:]] for lane in maxima], 0, 17, 1.0)
    yield "extrema"
