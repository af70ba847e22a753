"""What several ranks have used becomes one batch, or the reason why not."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from samestep.verification.recording import rows
from samestep.verification.recording.adjusting import doubled
from samestep.verification.recording.containers import mapped
from samestep.verification.reference.joining import UnjoinableError, joined, permuted
from samestep.verification.reference.norms import keep_whole, slice_norms


@dataclass
class Sample:
    x: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


class Loose:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that is no dict, with methods and attributes of its own."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Items(MutableMapping[str, Any]):
    """A mapping whose items are in a dictionary that a plain copy shares."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([range(2), range(2, 4)], [[0, 1], [2, 3]]),
        ([[0, 2], [1, 3]], [[0, 2], [1, 3]]),  # data[rank::2], of a script without a DataLoader
        ([], [[0, 1, 2, 3]]),
    ],
)
def test_batchnorm_has_the_statistics_of_each_rank_s_samples(rows: list[list[int]], parts: list[list[int]]) -> None:
    class Norm(torch.nn.BatchNorm1d):
        __module__ = "torch.nn.modules.batchnorm"

    module = ModuleType("batchnorm")
    module._BatchNorm = Norm  # type: ignore[attr-defined]
    slice_norms(module, lambda: rows)
    norm, plain = Norm(3), torch.nn.BatchNorm1d(3)
    value = torch.arange(12.0).view(4, 3).square()
    outputs = norm(value)
    for places in parts:
        assert torch.equal(outputs[places], torch.nn.BatchNorm1d(3)(value[places]))
    plain(value[parts[0]])
    assert torch.equal(norm.running_mean, plain.running_mean)  # rank 0's


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
        [Loose(torch.ones(2)), Loose(torch.ones(2))],
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


def test_batches_with_a_tensor_that_has_no_row_for_each_sample_are_not_joined() -> None:
    """Words of all texts behind one another, with the place at which each text begins; sequences with time first."""
    words, begins, labels = torch.arange(9), torch.tensor([0, 4]), torch.zeros(2)
    for packed in ((words, begins, labels), (torch.ones(7, 2, 5), labels)):
        with pytest.raises(UnjoinableError, match="one row for each sample"):
            joined([packed] * 2, (2, 2))
        assert rows.row_digests(packed, 2, loaded=True) == []  # places and labels are no samples


def test_samples_of_a_list_are_counted_and_told_apart() -> None:
    batch = boxes(1, 2, 1, 4)
    assert rows.count(batch, 4) == 4
    first, second, third, _ = rows.row_digests(batch, 4)
    assert first == third != second
    assert rows.count((torch.ones(4, 3), torch.ones(4)), 4) == 4
    assert rows.row_digests((torch.ones(4, 3), torch.ones(4)), 4) == rows.row_digests((torch.ones(4, 3), torch.ones(4)))


# --- batches of types of their own: a script calls their methods, so they come back as what they were ---


def in_types(x: torch.Tensor) -> list[Any]:
    return [
        Encoding({"x": x}, "text"),
        OrderedDict(x=x),
        Items(x=x),
        Sample(x),
        Frozen(x, "text"),
        Pair(x, x),
        {"inner": Encoding({"x": x}, "text")},
    ]


@pytest.mark.parametrize(("one", "other"), [*zip(in_types(torch.arange(2.0)), in_types(torch.ones(1)), strict=True)])
def test_a_batch_comes_back_as_its_own_type(one: Any, other: Any) -> None:
    batch = joined([mapped(one, torch.clone), mapped(other, torch.clone)], [2, 1])
    again = doubled(permuted(batch, torch.tensor([2, 0, 1])))
    assert type(one) is type(mapped(one, torch.clone)) is type(batch) is type(again)
    assert rows.leaves(again)[0].tolist() == [1, 0, 1]
    assert rows.leaves(again)[0].dtype == torch.float64
    assert rows.leaves(one)[0].tolist() == [0, 1]
    assert rows.row_digests(one) == rows.row_digests(rows.leaves(one))
    inner = again["inner"] if isinstance(one, dict) and "inner" in one else again
    assert getattr(inner, "kind", "text") == "text"


def test_a_mapping_that_cannot_be_changed_is_made_anew() -> None:
    frozen = MappingProxyType({"x": torch.ones(2)})
    assert type(joined([frozen, frozen])) is MappingProxyType


def test_a_batch_that_tells_its_number_of_samples_is_not_joined() -> None:
    parts = [{"x": torch.ones(size, 3), "samples": size} for size in (4, 3)]
    with pytest.raises(UnjoinableError, match="number of samples"):
        joined(parts, [4, 3])
    assert joined([{"x": torch.ones(4), "classes": 7}] * 2, [4, 4])["classes"] == 7


@pytest.mark.parametrize(
    ("are_local", "whole"),
    [
        ([True, True], [False, False]),
        ([False, True], [True, False]),
        ([False], [True, True]),
        ([False, True, True], [False] * 2),
    ],
)
def test_a_batch_is_cut_only_for_the_norms_that_ranks_have_not_synchronised(
    are_local: list[bool], whole: list[bool]
) -> None:
    norms = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm2d(2)]
    keep_whole(norms, are_local)
    assert [hasattr(one, "samestep_is_synchronised") for one in norms] == whole
