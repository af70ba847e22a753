"""Where ranks begin to differ without a number of a tensor that tells."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import Event, record

from samestep.instrument.patch import uninstall
from samestep.verification.findings import Finding
from samestep.verification.journal import TraceWriter, read, value_path
from samestep.verification.judging import unloaded
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.sources import Sources
from samestep.verification.recording.sources import SourceTrace


def kept(folder: Path, *ranks: dict[str, Any]) -> Record:
    """A run whose ranks have kept so much."""
    for number, told in enumerate(ranks):
        value_path(folder, number, 1).parent.mkdir(parents=True)
        torch.save({"draws": [], "hashes": [], "writes": {}} | told, value_path(folder, number, 1))
    return Record(folder, [Rank(number, [{"kind": "sources", "kept": 1}]) for number in range(len(ranks))])


TWICE = Finding(code="samples-repeated", cause="9 samples are used twice", where="train.py:10")
LOOP = (0, ("plan.py:30", "train.py:100"))


@pytest.mark.parametrize(
    ("first", "other", "where"),
    [
        ([LOOP, LOOP], [LOOP, LOOP], "train.py:10"),
        ([LOOP, (0, ("plan.py:30", "plan.py:64", "train.py:90")), LOOP], [LOOP, LOOP], "plan.py:64"),
        ([LOOP], [(0, ("train.py:94",)), LOOP], "train.py:94"),
    ],
)
def test_the_first_draw_of_one_rank_alone_is_named(tmp_path: Path, first: Any, other: Any, where: str) -> None:
    sources = Sources(kept(tmp_path, {"draws": first}, {"draws": other}), are_alike=True)
    assert sources.of_samples(TWICE, still_found=True).where == where


@pytest.mark.parametrize(("are_alike", "where"), [(True, "train.py:36"), (False, "train.py:10")])
def test_hashes_of_texts_decide_where_equal_ones_mend_it(tmp_path: Path, are_alike: bool, where: str) -> None:
    sources = Sources(kept(tmp_path, {"hashes": ["train.py:36"]}, {}), are_alike=are_alike)
    found = sources.of_samples(TWICE, still_found=False)
    assert found.where == where
    assert ("hash()" in found.cause) is are_alike


def test_the_line_that_writes_to_a_parameter_is_named(tmp_path: Path) -> None:
    found = Finding(code="parameters-diverged", cause="something", step=2, tensor="w")
    writes = {"w": [(2, "train.py:26"), (9, "train.py:50")]}
    assert Sources(kept(tmp_path, {"writes": writes}), are_alike=True).of_parameters(found).where == "train.py:26"
    assert Sources(kept(tmp_path / "b", {}), are_alike=True).of_parameters(found) == found


@pytest.mark.parametrize(
    ("first", "other", "where"),
    [
        ([(0, "train.py:33"), (2, "train.py:50")], [], "train.py:33"),  # weights that rank 0 alone loads
        ([(0, "train.py:33"), (0, "train.py:34")], [(0, "train.py:33"), (0, "train.py:34")], "train.py:34"),
        ([(0, "train.py:33"), (0, "train.py:34")], [(0, "train.py:34")], "train.py:33"),
        ([(2, "train.py:50")], [], "train.py:12"),
    ],
)
def test_the_line_that_writes_to_a_parameter_before_the_first_step_is_named(
    tmp_path: Path, first: Any, other: Any, where: str
) -> None:
    found = Finding(code="initial-state-differs", cause="something", step=0, tensor="w", where="train.py:12")
    ranks = kept(tmp_path, {"writes": {"w": first}}, {"writes": {"w": other}})
    assert Sources(ranks, are_alike=True).of_initial(found).where == where


def test_draws_hashes_and_writes_are_kept(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    trace = SourceTrace(TraceWriter(tmp_path, 0), lambda: {"w": weight}, lambda: 3)
    try:
        trace.enter()
        with torch.no_grad():
            weight.fill_(1.0)
            trace.begin_step()
            weight.add_(1.0)
            trace.end_step()
        random.Random(1).shuffle([1, 2])
        tempfile.mkdtemp(dir=tmp_path)  # its name comes from a generator of tempfile's own
        assert hash("a text") != hash("another")
    finally:
        trace.end()
        uninstall()
    (event,) = read(tmp_path, 0)
    told = torch.load(value_path(tmp_path, 0, event["kept"]))
    assert [window for window, _ in told["writes"]["w"]] == [3]
    assert len(told["draws"]) == 1
    assert len(told["hashes"]) == 1


@pytest.mark.parametrize(
    ("first", "other", "alone", "count"),
    [
        (["ab", "ab"], ["cd", "cd"], ["abcd", "a"], 0),
        (["ab", "ab"], ["bc", "cb"], ["abcd", "a"], 1),  # parts of orders that differ
        (["abcd", "a"], ["dcba", "d"], ["bcda", "b"], 0),  # each rank draws from all
        (["ab"], ["bc"], ["abcd", "a"], 0),  # none begins again
    ],
)
def test_parts_of_the_data_that_overlap_are_counted(
    first: list[str], other: list[str], alone: list[str], count: int
) -> None:
    def rank(calls: list[str]) -> list[Event]:
        return [{"kind": "input", "window": i, "rows": [*call]} for i, call in enumerate(calls)]

    assert unloaded._overlap(record(rank(first), rank(other)), record(rank(alone))) == count
