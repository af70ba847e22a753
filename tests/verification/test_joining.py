"""What several ranks have used becomes one batch, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samestep.verification.reference.joining import UnjoinableError, joined, permuted


@dataclass
class Sample:
    x: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_tensors_are_joined_in_rank_order() -> None:
    assert joined([torch.tensor([1, 2]), torch.tensor([3])]).tolist() == [1, 2, 3]


def test_containers_are_joined_inside() -> None:
    batch = joined([{"x": torch.ones(2, 3), "name": ["a", "b"]}, {"x": torch.zeros(1, 3), "name": ["c"]}])
    assert batch["x"].shape == (3, 3)
    assert batch["name"] == ["a", "b", "c"]
    assert joined([Pair(torch.ones(1), torch.ones(1)), Pair(torch.ones(2), torch.ones(2))]).y.shape == (3,)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(2, 3), torch.ones(2, 4)],
        [{"x": torch.ones(1)}, {"y": torch.ones(1)}],
        [torch.ones(1), [1]],
        [3, 4],
        [np.ones((2, 3)), np.ones((2, 4))],
        [Sample(torch.ones(2)), Sample(torch.ones(2))],
    ],
)
def test_what_has_no_meaning_joined_is_refused(parts: list[object]) -> None:
    with pytest.raises(UnjoinableError):
        joined(parts)


def test_samples_keep_together_in_another_order() -> None:
    x, names = permuted((torch.arange(6).view(3, 2), ["a", "b", "c"]), torch.tensor([2, 0, 1]))
    assert x.tolist() == [[4, 5], [0, 1], [2, 3]]
    assert names == ["c", "a", "b"]


def test_arrays_are_joined_as_tensors_are() -> None:
    x, y = joined([(np.arange(4).reshape(2, 2), np.zeros(2)), (np.ones((1, 2), dtype=int), np.ones(1))])
    assert x.tolist() == [[0, 1], [2, 3], [1, 1]]
    assert y.tolist() == [0, 0, 1]
    x, y = permuted((x, y), torch.tensor([2, 0, 1]))
    assert (x.tolist(), y.tolist()) == ([[1, 1], [0, 1], [2, 3]], [1, 0, 0])
