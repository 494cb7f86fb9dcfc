"""The Python around the host kernels: from a list of parameters to a packed buffer and back."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from shard_sizes import kimi_k2_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel.kernels import host
from hyper_parallel.platform.torch.finish import GRID_EXPONENT
from hyper_parallel.platform.torch.grad_shards import collect_grad_shards
from hyper_parallel.platform.torch.parameter_list import ParameterList
from hyper_parallel.platform.torch.partial_norms import measure
from hyper_parallel.platform.torch.wire_format import PartialNorm, Votes, WireFormat

__all__ = ["measure_python_walk"]

_GROUP_SIZE = 128
_COUNTS = (len(kimi_k2_shards()), 2000, 20_000)


def measure_python_walk(repetitions: int) -> str:
    """Return a table: milliseconds of collecting, measuring and packing parameters of one element.

    One element each, so that what is left is Python and the call of the kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            lines = ["parameters  collect  measure  pack and unpack  all (ms)  us per parameter"]
            lines += [_line(num_params, max(repetitions, 7)) for num_params in _COUNTS]
        finally:
            dist.destroy_process_group()
    return "\n".join(lines)


def _line(num_params: int, repetitions: int) -> str:
    params = _make_parameters(num_params)
    listed = ParameterList(params)
    wire = WireFormat(_GROUP_SIZE, 2.0)
    shards = collect_grad_shards(listed)
    partials, _ = measure(shards.tensors, 2.0)

    def pack_and_unpack() -> None:
        lanes: list[PartialNorm | None] = [
            wire.combine(partials.select(indices))
            for indices in shards.indices_by_rank_set().values()
        ]
        packed = wire.pack(Votes(), 0, lanes)
        total = wire.decode(list(packed[wire.header_numel :]))
        if total.grid_sum != num_params << -GRID_EXPONENT:
            raise AssertionError("the walk lost a parameter")

    collect_ms = _median_ms(lambda: collect_grad_shards(ParameterList(params)), repetitions)
    measure_ms = _median_ms(lambda: measure(shards.tensors, 2.0, are_plain=True), repetitions)
    pack_ms = _median_ms(pack_and_unpack, repetitions)
    total_ms = collect_ms + measure_ms + pack_ms
    return (
        f"{num_params:10d} {collect_ms:8.2f} {measure_ms:8.2f} {pack_ms:16.2f} {total_ms:9.2f} "
        f"{total_ms / num_params * 1e3:17.2f}"
    )


def _make_parameters(num_params: int) -> list[torch.nn.Parameter]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    params = []
    for _ in range(num_params):
        pair = [DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False) for _ in "pg"]
        param = torch.nn.Parameter(pair[0])
        param.grad = pair[1]
        params.append(param)
    return params


def _median_ms(run: Callable[[], object], repetitions: int) -> float:
    if not host.is_available():
        raise RuntimeError("there are no host kernels to measure")
    run()
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3
