"""Bad arguments come back as a status with a message, not as a crash."""

import math
from array import array

import pytest
import torch

from hyper_parallel.kernels import host
from hyper_parallel.kernels.host.library import TensorTable

ELEMENTS = torch.ones(4)
FLOAT32 = b"\0"


def table(address=None, numel=4, tensor_format=FLOAT32):
    address = ELEMENTS.data_ptr() if address is None else address
    return TensorTable(array("Q", [address]), array("q", [numel]), tensor_format)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (table(numel=-1), "tensor 0: expected numel >= 0, got -1"),
        (table(address=0), "tensor 0: expected an address, got null"),
        (table(tensor_format=b"\4"), "tensor 0: expected a format from 0 to 3, got 4"),
    ],
    ids=["numel", "address", "format"],
)
def test_bad_tensors_are_told_apart(bad, message):
    library = host.load()
    calls = [
        lambda: library.partial_norms(bad, 2.0, 1, bytearray(56)),
        lambda: library.exact_sums_of_squares(bad, 1, bytearray(96)),
        lambda: library.scale(bad, 0.5, 1),
        lambda: library.read(bad, 1),
        lambda: library.read_and_write(bad, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("norm_type", [math.nan, -1.0])
def test_bad_norm_type(norm_type):
    with pytest.raises(ValueError, match="expected norm_type >= 0, inf or -inf"):
        host.partial_norms([ELEMENTS], norm_type)


def test_bad_number_of_threads():
    with pytest.raises(ValueError, match="expected num_threads >= 1, got 0"):
        host.load().scale(table(), 0.5, 0)


def test_exact_sum_of_float64():
    with pytest.raises(ValueError, match="tensor 1: expected float32, bfloat16 or float16"):
        host.exact_sums_of_squares([ELEMENTS, ELEMENTS.double()])


def test_no_room_for_results():
    with pytest.raises(ValueError, match="expected room for results, got null"):
        host.load().partial_norms(table(), 2.0, 1, bytearray())


def test_unknown_instruction_set():
    with pytest.raises(ValueError, match=r"instruction sets of this processor \(.*scalar\)"):
        host.use_instruction_set("mmx")


def test_empty_tensor_may_have_any_address():
    host.load().scale(table(address=0, numel=0), 0.5, 1)


def test_error_leaves_elements_alone():
    assert ELEMENTS.tolist() == [1.0] * 4
