"""What several ranks have used becomes one batch, or the reason why not."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from samestep.verification.reference.joining import UnjoinableError, joined, permuted


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
    ],
)
def test_what_has_no_meaning_joined_is_refused(parts: list[object]) -> None:
    with pytest.raises(UnjoinableError):
        joined(parts)


def test_samples_keep_together_in_another_order() -> None:
    x, names = permuted((torch.arange(6).view(3, 2), ["a", "b", "c"]), torch.tensor([2, 0, 1]))
    assert x.tolist() == [[4, 5], [0, 1], [2, 3]]
    assert names == ["c", "a", "b"]
