"""Every collective of the hccl backend gives the right result."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.simnpu,
    # torch 2.13 renamed them; 2.9 has only the old names.
    pytest.mark.filterwarnings("ignore:.*_tensor` is deprecated:FutureWarning"),
]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
]


def ranks(fn: Callable[[int], object]) -> list[object]:
    return run_ranks(fn, 2, backend="hccl")


def device_range(numel: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(start, start + numel, dtype=dtype, device="npu")


def test_all_reduce_and_all_gather_serve_every_dtype() -> None:
    def fn(rank: int) -> list[tuple[list[float], list[float]]]:
        results = []
        for dtype in DTYPES:
            total = device_range(3, rank, dtype)
            dist.all_reduce(total)
            gathered = torch.zeros(4, dtype=dtype, device="npu")
            dist.all_gather_into_tensor(gathered, device_range(2, 10 * rank, dtype))
            results.append((total.tolist(), gathered.tolist()))
        return results

    assert ranks(fn) == [[([1, 3, 5], [0, 1, 10, 11])] * len(DTYPES)] * 2


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 6.0),
        (dist.ReduceOp.AVG, 3.0),
        (dist.ReduceOp.MAX, 4.0),
        (dist.ReduceOp.MIN, 2.0),
        (dist.ReduceOp.PRODUCT, 8.0),
    ],
    ids=["sum", "avg", "max", "min", "product"],
)
def test_all_reduce_serves_every_operation(op: dist.ReduceOp.RedOpType, expected: float) -> None:
    def fn(rank: int) -> float:
        tensor = torch.tensor([2.0 * (rank + 1)], device="npu")
        dist.all_reduce(tensor, op=op)
        return tensor.item()

    assert ranks(fn) == [expected] * 2


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "avg"])
@pytest.mark.parametrize("numel", [6, 6 << 15], ids=["one-round", "ring"])
def test_all_reduce_adds_small_and_large_tensors_alike(
    numel: int, op: dist.ReduceOp.RedOpType
) -> None:
    def fn(rank: int) -> bool:
        addend = (torch.arange(numel) % 1000).float().view(2, -1)
        total = (addend * (1 + rank)).to("npu")
        dist.all_reduce(total, op=op)
        return torch.equal(total.cpu(), addend * (6 if op == dist.ReduceOp.SUM else 2))

    assert run_ranks(fn, 3, backend="hccl") == [True] * 3


def test_ranks_that_ask_for_different_operations_do_not_wait_for_ever() -> None:
    def fn(rank: int) -> float:
        tensor = torch.tensor([2.0 * (rank + 1)], device="npu")
        dist.all_reduce(tensor, op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])
        return tensor.item()

    assert ranks(fn) == [6.0, 4.0]


def all_gather(rank: int) -> list[float]:
    outputs = [torch.zeros(2, device="npu") for _ in range(2)]
    dist.all_gather(outputs, device_range(2, 10 * rank))
    return torch.cat(outputs).tolist()


def all_gather_of_own_slice(rank: int) -> list[float]:
    # As FSDP does: the input is a slice of the output.
    output = torch.zeros(4, device="npu")
    mine = output[2 * rank : 2 * rank + 2]
    mine.copy_(device_range(2, 10 * rank))
    dist.all_gather_into_tensor(output, mine)
    return output.tolist()


def all_gather_coalesced(rank: int) -> list[float]:
    outputs = [torch.zeros(2, device="npu"), torch.zeros(4, device="npu")]
    with dist._coalescing_manager(device=torch.device("npu", rank)):
        dist.all_gather_into_tensor(outputs[0], device_range(1, rank))
        dist.all_gather_into_tensor(outputs[1], device_range(2, 10 * rank))
    return torch.cat(outputs).tolist()


def reduce_scatter(rank: int) -> list[float]:
    output = torch.zeros(2, device="npu")
    dist.reduce_scatter(output, [device_range(2), device_range(2, 10)])
    return output.tolist()


def reduce_scatter_tensor(rank: int) -> list[float]:
    output = torch.zeros(2, device="npu")
    dist.reduce_scatter_tensor(output, device_range(4), op=dist.ReduceOp.AVG)
    return output.tolist()


def reduce_scatter_coalesced(rank: int) -> list[float]:
    outputs = [torch.zeros(1, device="npu"), torch.zeros(2, device="npu")]
    with dist._coalescing_manager(device=torch.device("npu", rank)):
        dist.reduce_scatter_tensor(outputs[0], device_range(2))
        dist.reduce_scatter_tensor(outputs[1], device_range(4))
    return torch.cat(outputs).tolist()


def all_reduce_coalesced(rank: int) -> list[float]:
    tensors = [device_range(1, 1), device_range(2, 5)]
    with dist._coalescing_manager(device=torch.device("npu", rank)):
        for tensor in tensors:
            dist.all_reduce(tensor)
    return torch.cat(tensors).tolist()


def all_to_all_single(rank: int) -> list[float]:
    # Rank 0 keeps one element and sends two; rank 1 sends one and keeps two.
    output = torch.zeros([2, 4][rank], device="npu")
    splits = [[1, 1], [2, 2]][rank]
    dist.all_to_all_single(
        output, device_range(3, 10 * rank), output_split_sizes=splits, input_split_sizes=[1, 2]
    )
    return output.tolist()


def all_to_all(rank: int) -> list[float]:
    outputs = [torch.zeros(1, device="npu") for _ in range(2)]
    dist.all_to_all(outputs, list(device_range(2, 10 * rank).split(1)))
    return torch.cat(outputs).tolist()


def broadcast(rank: int) -> list[float]:
    tensor = device_range(2, 10 * rank)
    dist.broadcast(tensor, src=1)
    return tensor.tolist()


def reduce(rank: int) -> list[float]:
    tensor = device_range(2, 10 * rank)
    dist.reduce(tensor, dst=1)
    return tensor.tolist() if rank == 1 else []


def gather(rank: int) -> list[float]:
    outputs = [torch.zeros(1, device="npu") for _ in range(2)] if rank == 0 else None
    dist.gather(device_range(1, rank + 5), outputs, dst=0)
    return torch.cat(outputs).tolist() if outputs else []


def scatter(rank: int) -> list[float]:
    output = torch.zeros(1, device="npu")
    dist.scatter(output, list(device_range(2, 7).split(1)) if rank == 0 else None, src=0)
    return output.tolist()


def send_recv(rank: int) -> list[float]:
    tensor = device_range(2, 10 * rank)
    if rank == 0:
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    return tensor.tolist()


def batched_send_recv(rank: int) -> list[float]:
    received = torch.zeros(2, device="npu")
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, device_range(2, 10 * rank), 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
    )
    for work in works:
        work.wait()
    return received.tolist()


def all_gather_object(rank: int) -> list[float]:
    objects: list[float | None] = [None, None]
    dist.all_gather_object(objects, rank + 0.5)
    return objects


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (all_gather, [[0, 1, 10, 11]] * 2),
        (all_gather_of_own_slice, [[0, 1, 10, 11]] * 2),
        (all_gather_coalesced, [[0, 1, 0, 1, 10, 11]] * 2),
        (reduce_scatter, [[0, 2], [20, 22]]),
        (reduce_scatter_tensor, [[0, 1], [2, 3]]),
        (reduce_scatter_coalesced, [[0, 0, 2], [2, 4, 6]]),
        (all_reduce_coalesced, [[2, 10, 12]] * 2),
        (all_to_all_single, [[0, 10], [1, 2, 11, 12]]),
        (all_to_all, [[0, 10], [1, 11]]),
        (broadcast, [[10, 11]] * 2),
        (reduce, [[], [10, 12]]),
        (gather, [[5, 6], []]),
        (scatter, [[7], [8]]),
        (send_recv, [[0, 1]] * 2),
        (batched_send_recv, [[10, 11], [0, 1]]),
        (all_gather_object, [[0.5, 1.5]] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_collective_gives_the_right_result(
    fn: Callable[[int], object], expected: list[object]
) -> None:
    assert ranks(fn) == expected
