"""A digest sees every bit, every position, the type and the shape; and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.runtime.digest import bytes_of, digest


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20), st.data())
def test_two_exchanged_values_are_seen(values: list[float], data: st.DataObject) -> None:
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    other = list(values)
    other[i], other[j] = other[j], other[i]
    same = torch.equal(torch.tensor(values).view(torch.int32), torch.tensor(other).view(torch.int32))
    assert (digest(torch.tensor(values)) == digest(torch.tensor(other))) == same


def test_duplicates_are_told_apart_where_torchs_own_hash_is_blind() -> None:
    five, seven = torch.tensor([5, 5]), torch.tensor([7, 7])
    assert torch.hash_tensor(five) == torch.hash_tensor(seven)  # what this one must not do
    assert digest(five) != digest(seven)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_one_changed_bit_changes_it(dtype: torch.dtype) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    before = digest(tensor)
    tensor.view(torch.uint8)[777] ^= 1
    assert digest(tensor) != before


def test_layout_and_strides_do_not_matter() -> None:
    tensor = torch.randn(4, 5, 6)
    assert digest(tensor.permute(2, 0, 1)) == digest(tensor.permute(2, 0, 1).contiguous())
    assert digest(tensor[::2]) == digest(tensor[::2].clone())


def test_shape_and_type_matter() -> None:
    zeros = torch.zeros(6)
    assert len({digest(zeros), digest(zeros.view(2, 3)), digest(zeros.int()), digest(torch.zeros(0))}) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_same() -> None:
    tensor = torch.randn(1000)
    assert digest(tensor) == digest(tensor.cuda())


@pytest.mark.parametrize(
    "made", [torch.Tensor.conj, torch.Tensor.t, torch.Tensor.contiguous, lambda one: one.conj().imag]
)
def test_bytes_are_of_the_values_in_the_order_of_the_dims(made):
    tensor = made(torch.tensor([[1 + 2j, 3 - 4j], [5j, -6]]))
    kept = bytes_of(tensor)
    assert kept.dtype == torch.uint8
    assert kept.numpy().tobytes() == np.ascontiguousarray(tensor.resolve_conj().resolve_neg().numpy()).tobytes()
