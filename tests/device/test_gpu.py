"""The device kernels on a real GPU: `TRITON_INTERPRET=0 pytest -m device tests/device`.

benchmarks/device_check.sh runs this and the benchmark, in ten minutes.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hyper_parallel as hp
from hyper_parallel.kernels import reference
from hyper_parallel.kernels import triton as kernels
from tests.kernels.host_inputs import any_bits, normal, subnormal
from tests.kernels.triton_checks import (
    DTYPES,
    SIZES,
    amid,
    check_encode,
    check_finish,
    check_partial_norms,
    check_scale,
    host_lane,
)
from tests.reference import assert_rounds_sqrt, exact_pow_sum

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="set TRITON_INTERPRET=0 for a real device"
    ),
]


def on_gpu(tensors: list[torch.Tensor], filler: float = math.nan) -> list[torch.Tensor]:
    return [amid(filler, tensor.cuda(), 1 + i % 3) for i, tensor in enumerate(tensors)]


@pytest.mark.parametrize("power", [2, 1, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_norms_are_right(dtype, power):
    tensors = [normal(numel, dtype, seed=numel) for numel in (*SIZES, 100_003)]
    tensors += [any_bits(3000, dtype, seed, finite=True) for seed in range(5)]
    tensors.append(subnormal(1000, dtype, seed=1))
    check_partial_norms(kernels, on_gpu(tensors), power)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_nonfinite_elements_are_counted(special, dtype):
    tensor = normal(100_003, dtype)
    tensor[77_777] = special
    check_partial_norms(kernels, on_gpu([normal(5, dtype), tensor]), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_512_mi_elements_is_right(dtype):
    tensor = torch.randn(512 << 20, device="cuda", dtype=torch.float32).to(dtype)
    launcher = kernels.Launcher([tensor], [0], tensor.device)
    rows = launcher.partial_norms([tensor], 2).cpu()
    [measured] = kernels.totals_of_ranges(rows, [(0, len(rows))], 2).values
    assert measured == pytest.approx(reference.pow_sum64(tensor, 2), rel=2.0**-43)


@pytest.mark.parametrize("power", [2, 1])
@pytest.mark.parametrize("digit_bits", [23, 17, 10])
def test_lanes_and_norms_are_right(digit_bits, power):
    lanes = [on_gpu([normal(3000, torch.float32)]), on_gpu([torch.full((99,), 1e20)])]
    incoming = [host_lane(value, digit_bits) for value in (1.0 / 3, 1e300, 2.5)]
    check_encode(kernels, lanes, power, digit_bits, incoming)
    for max_norm in (1.0, math.inf):
        check_finish(kernels, incoming, power, digit_bits, max_norm, device="cuda")
        check_finish(kernels, incoming[2:], power, digit_bits, max_norm, device="cuda")
    check_finish(kernels, [host_lane(2.0, digit_bits, 1)], power, digit_bits, 1.0, device="cuda")


@pytest.mark.parametrize("coefficient", [0.3, 1.0, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_rounds_once(dtype, coefficient):
    tensors = [normal(numel, dtype, seed=numel) for numel in (*SIZES, 100_003)]
    check_scale(kernels, on_gpu(tensors, filler=7.0), coefficient)


@pytest.fixture
def nccl(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("host", ["none", "some", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clip_of_host_and_device_shards(nccl, host, dtype):
    """Measured and scaled where they lie, added up on the host: a group of one reduces nothing."""
    mesh = init_device_mesh("cuda", (1,))
    params = []
    for i in range(6):
        grad = normal(10_000 + i, dtype, seed=i).cuda()
        param = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(grad), mesh, [Shard(0)]))
        param.grad = DTensor.from_local(grad, mesh, [Shard(0)])
        if host == "all" or (host == "some" and i % 2):
            spec = param.grad._spec
            param = torch.nn.Parameter(
                DTensor(param.detach().to_local().cpu(), spec, requires_grad=False)
            )
            param.grad = DTensor(grad.cpu(), spec, requires_grad=False)
        params.append(param)
    before = [param.grad.to_local().cpu().clone() for param in params]
    total = hp.clip_grad_norm_(params, 1.0)
    assert_rounds_sqrt(total.cpu(), exact_pow_sum(before))
    coef = float(torch.clamp(1.0 / (total.cpu() + 1e-6), max=1.0))
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.grad.to_local().cpu(), reference.scale(old, coef))
