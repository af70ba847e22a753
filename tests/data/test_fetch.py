import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, Subset

import samestep
from samestep.errors import DataError

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


def line_of(text):
    (number,) = [number for number, line in enumerate(SOURCE, 1) if line.strip() == text]
    return f"test_fetch.py:{number}: {text}"


class WithBadSample(Dataset):
    def __init__(self):
        self.samples = [(f"pictures/{index}.png", 0) for index in range(8)]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("no\nlabel")
        return torch.tensor(index)


def error_of(dataset, **options):
    """What loading raises, and its cause; the error itself would keep workers, by its traceback."""
    with samestep.world() as world:
        try:
            list(samestep.shards(dataset, world, batch_size=4, **options))
        except DataError as error:
            return str(error), type(error.__cause__)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_one_line_that_names_it_its_worker_its_file_and_its_line(workers, streams):
    said, _ = error_of(WithBadSample(), workers=workers, sample_streams=streams)
    by = r" by worker 0 \(process \d+\)" if workers else ""
    reason = re.escape(r"KeyError: 'no\nlabel'")
    where = re.escape(line_of('raise KeyError("no\\nlabel")'))
    assert re.fullmatch(rf"sample 2 cannot be loaded{by}: {reason}, at \S*{where}; its file is pictures/2.png", said)


def test_what_it_raised_is_the_cause():
    assert error_of(WithBadSample())[1] is KeyError


class Missing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Path(f"/nowhere/{index}").read_bytes()


def test_a_missing_file_is_named_once():
    assert re.search(r"FileNotFoundError: .*'/nowhere/\d', at [^;]*$", error_of(Missing())[0])


def test_in_a_subset_the_file_is_that_of_the_whole_sets_sample():
    said, _ = error_of(Subset(WithBadSample(), [1, 2, 3]))
    assert said.startswith("sample 1 cannot be loaded: KeyError")
    assert said.endswith("its file is pictures/2.png")


class InBulk(Dataset):
    asked = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("bad")
        return torch.tensor(index)

    def __getitems__(self, indices):
        self.asked += 1
        return [self[index] for index in indices]


def test_a_dataset_that_loads_in_bulk_is_asked_so_without_sample_streams_and_names_its_bad_sample_all_the_same():
    data = InBulk()
    said, _ = error_of(data, sample_streams=False, shuffle=False)
    assert data.asked == 2
    assert said.startswith("sample 5 cannot be loaded: ValueError: bad, at ")


class Uneven(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_make_a_batch_are_named(workers):
    said, _ = error_of(Uneven(), workers=workers, shuffle=False)
    assert said.startswith("samples [0, 1, 2, 3] do not make a batch: RuntimeError: stack expects each tensor")
    assert "\n" not in said
