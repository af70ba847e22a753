"""The line of a script at which samples are chosen, by the number of the rank or by what it has kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from journals import Event, record

from samestep.verification.findings import Finding
from samestep.verification.judging.split import of_kept, of_samples

STREAM = """
import torch, torch.distributed as dist
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        torch.manual_seed(self.seed + self.rank)
        {split}
        yield from rows
def main():
    rank = dist.get_rank()
    if rank == 0:
        print("rank", rank)
    torch.manual_seed(7 + rank)
    {outside}
"""


def found(tmp_path: Path, text: str, *passes: Event, code: str = "samples-missing") -> str | None:
    (script := tmp_path / "train.py").write_text(text)
    finding = Finding(code=code, where="train.py:30", cause="twice", fix=None)
    where = of_samples(finding, record([*passes]), script).where
    return None if where is None or where == "train.py:30" else where.rpartition(":")[2]


def loader(dataset: str, sampler: str = "_InfiniteConstantSampler") -> Event:
    about = {"dataset": dataset, "sampler": sampler, **dict.fromkeys(("cut_by", "made", "sampler_made", "where"))}
    return {"kind": "pass", "key": "train.py:30#0", "number": 0, **about}


@pytest.mark.parametrize(
    "split",
    [
        "rows = islice(self.rows, self.rank, None, self.world)",
        "rows = self.rows[self.rank :: self.world]",
        "rows = (row for number, row in enumerate(self.rows) if number % self.world == self.rank)",
        "rows = read(self.rank + get_worker_info().id)",
    ],
)
def test_the_line_of_a_stream_is_found(tmp_path: Path, split: str) -> None:
    text = STREAM.format(split=split, outside="others = data[rank::2]")
    assert found(tmp_path, text, loader("Stream")) == "6"


SEEDED = """
import random, torch, torch.distributed as dist
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        order = {order}
        yield from islice(self.rows(order), self.rank, None, self.world)
def main():
    rank = dist.get_rank()
    run_seed = 7 + rank
    torch.manual_seed(run_seed)
    stream = Stream(rows, seed={seed})
"""


@pytest.mark.parametrize(
    ("order", "seed", "line"),
    [
        ("random.Random(self.seed + self.rank)", "7", "5"),
        ("random.Random(self.seed)", "run_seed", "11"),
        ("random.Random(self.seed)", "7 + dist.get_rank()", "11"),
        ("random.Random(self.seed)", "7", "6"),  # where it is divided
    ],
)
def test_the_line_that_seeds_each_rank_s_order_is_found(tmp_path: Path, order: str, seed: str, line: str) -> None:
    text = SEEDED.format(order=order, seed=seed)
    assert found(tmp_path, text, loader("Stream"), code="samples-repeated") == line
    assert found(tmp_path, text, loader("Stream")) == "6"  # no other order makes samples be missing


def test_outside_of_the_dataset_it_is_found_if_it_is_one_line(tmp_path: Path) -> None:
    one = STREAM.format(split="rows = self.rows", outside="stream = Stream(rows).shard(world, rank).skip(3)")
    assert found(tmp_path, one, loader("Stream")) == "13"
    assert found(tmp_path, one) == "13"
    assert found(tmp_path, one, loader("TensorDataset", "RandomSampler")) is None
    several = STREAM.format(split="rows = self.rows", outside="a = data[rank::2]\n    pass\n    b = data[rank]")
    assert found(tmp_path, several) is None


def test_a_script_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, "def (") is None
    assert found(tmp_path, "x = 1") is None


SAMPLER = """
class Sampler:
    def __init__(self):
        self.score = torch.ones(self.count)
    def start(self, epoch):
        self.generator = torch.Generator().manual_seed(self.seed + epoch)
        self.epoch = epoch
        self.is_first = epoch == 0
    def __iter__(self):
        scores = self.score + self.is_first
        yield from torch.multinomial(scores, self.count, generator=self.generator)
    def record(self, index, loss):
        self.found[index] = loss
    def end(self):
        {end}
"""


@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("self.score = torch.where(self.found > 0, self.found, self.score)", "15"),
        ("found = self.found\n        self.score = torch.where(found > 0, found, 0)", "16"),
        ("self.others = torch.where(self.found > 0, self.found, self.score)", "11"),  # no order is made of it
        ("self.score = 0", "11"),
    ],
)
def test_the_line_that_makes_the_scores_of_samples_is_found(tmp_path: Path, end: str, line: str) -> None:
    (script := tmp_path / "train.py").write_text(SAMPLER.format(end=end))
    finding = Finding(code="samples-repeated", where=f"{script}:11", cause="twice", fix=None)
    assert of_kept(finding, script).where == f"{script}:{line}"
    assert of_kept(finding, tmp_path / "other.py").where == f"{script}:11"
