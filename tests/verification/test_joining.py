"""What several ranks have used becomes one batch, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samestep.verification.recording import rows
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


# --- batches that nobody has stacked: torchvision's detection scripts collate by tuple(zip(*batch)) ---


def boxes(*names: int) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """A batch of pictures with 3 channels, and as many boxes as the name says."""
    return (
        tuple(torch.full((3, 2, 2), float(name)) for name in names),
        tuple({"boxes": torch.full((name, 4), float(name))} for name in names),
    )


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4), (4, 1)])
def test_pictures_in_a_list_are_put_behind_one_another(sizes: tuple[int, int]) -> None:
    names = list(range(1, sum(sizes) + 1))
    mine, theirs = names[: sizes[0]], names[sizes[0] :]
    images, targets = joined([boxes(*mine), boxes(*theirs)], sizes)
    assert [int(image[0, 0, 0]) for image in images] == names
    assert [len(target["boxes"]) for target in targets] == names
    order = torch.tensor(names).flip(0) - 1
    images, targets = permuted((images, targets), order)
    assert [len(target["boxes"]) for target in targets] == names[::-1]
    assert [int(image[0, 0, 0]) for image in images] == names[::-1]


def test_a_list_beside_unstacked_ones_has_one_item_a_sample_too() -> None:
    """Four targets of four numbers look as if they were stacked."""
    mine = list(boxes(1, 2, 3, 4)[0]), [torch.full((4,), float(name)) for name in (1, 2, 3, 4)]
    theirs = list(boxes(5, 6, 7)[0]), [torch.full((4,), float(name)) for name in (5, 6, 7)]
    _, targets = joined([mine, theirs], (4, 3))
    assert [target.tolist() for target in targets] == [[float(name)] * 4 for name in range(1, 8)]
    assert [int(one[0]) for one in permuted(joined([mine, theirs], (4, 3)), torch.arange(6, -1, -1))[1]] == [
        *range(7, 0, -1)
    ]


def test_two_samples_of_inputs_and_targets_are_no_pictures() -> None:
    x, y = joined([(torch.ones(2, 5), torch.zeros(2))] * 2, (2, 2))
    assert x.shape == (4, 5)
    assert y.shape == (4,)
    sequences, labels = joined([(torch.ones(7, 2, 5), torch.zeros(2, dtype=torch.int64))] * 2, (2, 2))
    assert labels.shape == (4,)
    assert sequences.shape == (14, 2, 5)


def test_samples_of_a_list_are_counted_and_told_apart() -> None:
    batch = boxes(1, 2, 1, 4)
    assert rows.count(batch, 4) == 4
    first, second, third, _ = rows.row_digests(batch, 4)
    assert first == third != second
    assert rows.count((torch.ones(4, 3), torch.ones(4)), 4) == 4
    assert rows.row_digests((torch.ones(4, 3), torch.ones(4)), 4) == rows.row_digests((torch.ones(4, 3), torch.ones(4)))
