"""Partial norms against float64 and exact references; scaling with one rounding."""

import math
from fractions import Fraction

import pytest
import torch

from hyper_parallel import get_total_norm
from hyper_parallel.platform.torch import partial_norms
from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.platform.torch.partial_norms import measure, scale_
from hyper_parallel.platform.torch.wire_format import PartialNorm
from hyper_parallel.testing import simnpu
from tests.ranks import run_ranks
from tests.reference import error_in_ulp, exact_pow_sum

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
ORDERS = [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf]


def sample(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype)


def reference(tensor: torch.Tensor, p: float) -> float:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).abs().flatten()
    if p == 0.0:
        return float(wide.count_nonzero())
    if math.isinf(p):
        return wide.max().item() if p > 0 else wide.min().item()
    return math.fsum(value**p for value in wide.tolist())


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2, 65535, 65536, 65537, 150_001])
def test_partial_norm_matches_float64_reference(p, dtype, numel):
    tensor = sample(numel, dtype)
    tensor[0] = 0.0
    [partial], copies = measure([tensor], p)
    assert partial.value == pytest.approx(reference(tensor, p), rel=1e-12)
    assert (partial.num_nan, partial.num_inf) == (0, 0)
    assert copies == Copies()


def test_sum_of_squares_of_float32_is_nearly_exact_in_float64():
    tensor = sample(4096, torch.float32)
    [partial], _ = measure([tensor], 2.0)
    assert Fraction(partial.value) == pytest.approx(exact_pow_sum([tensor]), rel=2.0**-48)


@pytest.mark.parametrize("p", ORDERS)
def test_empty_shard_is_the_identity(p):
    [partial], _ = measure([torch.empty(0, 4)], p)
    assert partial == PartialNorm(math.inf if p == -math.inf else 0.0)


STRIDED = {
    "transposed": lambda t: t.view(300, 500).t(),
    "every-third-column": lambda t: t.view(300, 500)[:, ::3],
    "column": lambda t: t.view(300, 500)[:, 7:8],
    "channels-last": lambda t: t.view(2, 3, 250, 100).to(memory_format=torch.channels_last),
    "offset": lambda t: t[3:],
    "expanded": lambda t: t[:1].expand(7),
    "scalar": lambda t: t[5],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("p", [2.0, math.inf, 3.0])
def test_strides_do_not_change_the_norm(name, p):
    tensor = STRIDED[name](sample(150_000, torch.float32))
    [partial], _ = measure([tensor], p)
    assert partial.value == pytest.approx(reference(tensor.contiguous(), p), rel=1e-12)


@pytest.mark.parametrize("p", [2.0, 1.0, 0.5, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_are_counted_wherever_they_are(p, dtype):
    tensor = sample(200_000, dtype)
    tensor[0] = math.nan
    tensor[70_000] = math.inf
    tensor[199_999] = -math.inf
    [partial], _ = measure([tensor], p)
    assert (partial.num_nan, partial.num_inf) == (1, 2)
    assert math.isfinite(partial.value)


def test_negative_inf_norm_ignores_inf_but_not_nan():
    [fine, poisoned, all_inf], _ = measure(
        [torch.tensor([math.inf, 3.0]), torch.tensor([math.nan, 3.0]), torch.tensor([math.inf])],
        -math.inf,
    )
    assert fine == PartialNorm(3.0)
    assert poisoned.num_nan == 1
    assert all_inf == PartialNorm(math.inf)


def test_overflow_of_finite_elements_counts_as_inf():
    [partial], _ = measure([torch.full((2,), 1e200, dtype=torch.float64)], 2.0)
    assert partial == PartialNorm(0.0, overflows=True)


def test_sparse_gradient_is_coalesced():
    indices = torch.tensor([[0, 2, 2]])
    values = torch.tensor([3.0, 1.0, 3.0])
    tensor = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    [partial], _ = measure([tensor], 2.0)
    assert partial.value == 25.0
    scale_([tensor], 0.5, foreach=True)
    assert tensor.to_dense().tolist() == [1.5, 0.0, 2.0, 0.0]


def test_sparse_gradient_has_zeros_that_it_does_not_store():
    indices, values = torch.tensor([[0, 2]]), torch.tensor([3.0, 1.0])
    tensor = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    assert measure([tensor], -math.inf)[0] == [PartialNorm(0.0)]
    full = torch.sparse_coo_tensor(torch.arange(2)[None], values, (2,), check_invariants=True)
    assert measure([full], -math.inf)[0] == [PartialNorm(1.0)]


_LARGE = 64 << 20


def norm_in_float64(tensor: torch.Tensor) -> float:
    """Return the 2-norm to a few 2^-53: squares of float32 are exact, sums are short."""
    chunks = map(torch.Tensor.double, tensor.split(1 << 12))
    return math.sqrt(math.fsum(torch.dot(chunk, chunk).item() for chunk in chunks))


def test_large_float32_shard_is_right_where_torch_is_half_a_percent_off():
    """64 Mi elements: torch accumulates in float32 and loses 0.5 %; DESIGN section 1."""
    tensor = sample(_LARGE, torch.float32, seed=3)
    reference_norm = norm_in_float64(tensor)
    ours = get_total_norm([tensor])
    theirs = torch.nn.utils.get_total_norm([tensor])
    assert error_in_ulp(ours, reference_norm) <= 0.5001
    assert abs(theirs.item() / reference_norm - 1) > 0.003


@pytest.mark.parametrize("numel", [_LARGE, _LARGE - 12345])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.01, torch.float32),
        (1e20, torch.float32),
        (1e-25, torch.float32),
        (6e4, torch.float16),
    ],
)
def test_constants_of_any_size_are_within_half_an_ulp(value, dtype, numel):
    tensor = torch.full((numel,), value, dtype=dtype)
    exact = tensor[0].double().item() * math.sqrt(numel)
    assert error_in_ulp(get_total_norm([tensor]), exact) <= 0.5001


def test_wide_range_of_exponents_is_within_half_an_ulp():
    exponents = torch.rand(_LARGE, generator=torch.Generator().manual_seed(4))
    tensor = exponents.mul_(80).sub_(60).exp2_()
    assert error_in_ulp(get_total_norm([tensor]), norm_in_float64(tensor)) <= 0.5001


def peak_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


@pytest.mark.parametrize("p", [2.0, math.inf, 3.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_extra_memory_is_below_one_percent_of_a_large_shard(p, transposed):
    """transformers#46113: a copy of the shard to float32 runs out of memory."""

    def rank_main(rank):
        del rank
        tensor = torch.ones(1 << 14, 1 << 13, dtype=torch.bfloat16)  # 256 MiB
        tensor = tensor.t() if transposed else tensor
        # Pages of code that are touched for the first time count, too.
        measure([tensor[:64]], p)
        scale_([tensor[:64]], 1.0, foreach=True)
        assert tensor[5, 5] == 1.0
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        before = peak_kib()
        measure([tensor], p)
        scale_([tensor], 0.5, foreach=True)
        assert tensor[5, 5] == 0.5
        return peak_kib() - before

    [extra_kib] = run_ranks(rank_main, 1, backend="none", timeout_s=50)
    assert extra_kib < 0.01 * 256 * 1024


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_computes_wide_and_rounds_once(dtype, foreach):
    coef = float(torch.tensor(0.3, dtype=torch.float32))  # not a bfloat16: it must not be rounded
    tensors = [sample(numel, dtype, seed=numel) for numel in (0, 1, 7, 64, 1001)]
    wide = {torch.float64: torch.float64, torch.complex128: torch.complex128}
    for tensor in [*tensors, sample(600, dtype).view(20, 30).t()]:
        middle = wide.get(dtype, torch.complex64 if dtype.is_complex else torch.float32)
        expected = (tensor.to(middle) * coef).to(dtype)
        scale_([tensor], coef, foreach=foreach)
        assert torch.equal(tensor, expected)


@pytest.mark.simnpu
@pytest.mark.parametrize("has_float64", [True, False])
def test_device_shards_are_measured_like_host_shards(has_float64):
    """Where a device has no float64, sums are float32, scaled so that no power leaves its range."""

    def rank_main(rank):
        partial_norms._has_float64 = lambda device: has_float64
        partial_norms.launch_norms = lambda *args: []  # no kernels either
        tensors = [
            sample(150_001, torch.float32),
            sample(10_001, torch.bfloat16),
            sample(999, torch.float16),
            sample(64, torch.complex64),
            torch.full((100,), 1e20),
            torch.full((100,), 1e-25),
            torch.empty(0, 3),
            torch.zeros(5),
            sample(600, torch.float32).view(20, 30).t(),
            torch.tensor([1.0, math.nan, math.inf, -math.inf]),
        ]
        moved = [tensor.to("npu") for tensor in tensors]
        for p in ORDERS:
            on_host, _ = measure(tensors, p)
            on_device, copies = measure(moved, p)
            fetches = 2 if p == math.inf or 0 < p < math.inf or p == -math.inf else 1
            assert copies == Copies(d2h=fetches, host_syncs=fetches)
            tolerance = 1e-13 if has_float64 else 2e-5
            for ours, theirs in zip(on_device, on_host, strict=True):
                assert ours.value == pytest.approx(theirs.value, rel=tolerance)
                assert (ours.num_nan, ours.num_inf) == (theirs.num_nan, theirs.num_inf)

    run_ranks(rank_main, 1, backend="hccl")


@pytest.mark.simnpu
@pytest.mark.triton
def test_device_shards_are_measured_and_scaled_by_kernels_where_these_take_them():
    def rank_main(rank):
        fits = [
            sample(5001, torch.float32),
            sample(101, torch.bfloat16),
            torch.full((100,), 1e20),
            torch.empty(0, 3),
            torch.tensor([1.0, math.nan, math.inf, -math.inf]),
        ]
        others = [
            sample(64, torch.complex64),
            sample(600, torch.float32).view(20, 30).t(),
            sample(10, torch.float64),
        ]
        for tensors in (fits, fits + others):
            for p in (2.0, 1.0, math.inf):
                on_host, _ = measure(tensors, p)
                simnpu.reset_counters()
                on_device, copies = measure([tensor.to("npu") for tensor in tensors], p)
                assert simnpu.counters()["kernel_launches"] == 2
                # One fetch of the kernels' rows; else two of the operators', for NaN is about.
                assert copies.d2h == copies.host_syncs == (1 if tensors is fits else 2)
                for ours, theirs in zip(on_device, on_host, strict=True):
                    assert ours.value == pytest.approx(theirs.value, rel=1e-12)
                    assert (ours.num_nan, ours.num_inf) == (theirs.num_nan, theirs.num_inf)
            moved = [tensor.to("npu") for tensor in tensors]
            scale_(tensors, 0.375, foreach=True)
            scale_(moved, 0.375, foreach=True)
            for ours, theirs in zip(moved, tensors, strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)

    run_ranks(rank_main, 1, backend="hccl", timeout_s=60)


@pytest.mark.simnpu
@pytest.mark.triton
def test_an_npus_private_formats_are_left_to_single_operators():
    """What torch_npu keeps in an order of its own, such as NZ (29), kernels would misread."""

    def rank_main(rank):
        private = sample(128, torch.float32).to("npu")
        moved = [sample(64, torch.float32).to("npu"), private]
        torch.npu.get_npu_format = lambda tensor: 29 if tensor is private else 2
        partials, _ = measure(moved, 2.0)
        expected, _ = measure([tensor.cpu() for tensor in moved], 2.0)
        for ours, theirs in zip(partials, expected, strict=True):
            assert ours.value == pytest.approx(theirs.value, rel=1e-12)
        simnpu.configure(trace_ops=True)
        simnpu.reset_counters()
        scale_(moved, 0.5, foreach=True)
        counters = simnpu.counters()
        assert counters["kernel_launches"] == 1
        assert "op.aten::_foreach_mul_" not in counters

    run_ranks(rank_main, 1, backend="hccl", timeout_s=60)
