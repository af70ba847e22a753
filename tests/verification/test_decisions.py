"""The line at which a rank takes the number out of a tensor by which it decides otherwise than the others."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import ended, record, step
from lazily import Lazily

import samestep
from samestep import Report
from samestep.verification import locating
from samestep.verification.findings import Finding
from samestep.verification.journal import TraceWriter, read, value_path
from samestep.verification.judging.paths import Paths, _without_own
from samestep.verification.judging.record import Record
from samestep.verification.judging.storage import OWN_NUMBER
from samestep.verification.recording.paths import RATES, PathTrace

STEP, ITEM, LOG, FORWARD = ("a.py:9", "add_"), ("a.py:4", "item"), ("a.py:7", "item"), ("a.py:2", "linear")


def found(code: str) -> Finding:
    return Finding(code=code, property="control", cause="Here", where="a.py:9")


def paths(first: dict[int, list[Any]], other: dict[int, list[Any]]) -> Paths:
    return Paths(*_without_own(first, other), of="rank 1")


def test_the_last_number_that_differs_before_the_ways_part_is_named() -> None:
    way = [(FORWARD, None), (LOG, 0.5), (ITEM, 2.0)]
    first = {0: [*way, (STEP, None)], 1: [*way, (STEP, None), (FORWARD, None)]}
    other = {0: [(FORWARD, None), (LOG, 0.6), (ITEM, 2.5), (STEP, None)], 1: [*way[:2], (ITEM, 3.0), (FORWARD, None)]}
    located = paths(first, other).located(found("steps-differ"), None)
    assert located.where == "a.py:4"
    assert "than rank 1" in located.cause
    assert "(shows at a.py:9)" in located.cause


def test_lines_that_one_rank_alone_comes_by_part_no_ways() -> None:
    printing = (("a.py:8", "item"), 0.5)
    first, other = {0: [(ITEM, 1.0), printing, (STEP, None)]}, {0: [(ITEM, 2.0), (STEP, None)]}
    assert paths(first, other).located(found("steps-differ"), None) == found("steps-differ")


def test_ways_that_part_for_good_are_told_from_others() -> None:
    way, short = [(ITEM, 1.0), (STEP, None), (FORWARD, None)], [(ITEM, 2.0), (FORWARD, None)]
    assert not paths({0: way, 1: way, 2: way}, {0: way, 1: short, 2: way}).part_for_good
    assert paths({0: way, 1: way, 2: way}, {0: way, 1: short, 2: short}).part_for_good


def test_of_what_is_saved_the_last_number_that_differs_is_named() -> None:
    mine = [(FORWARD, None), (ITEM, 0.25), (STEP, None), (FORWARD, None), (("a.py:11", "backward"), None), (LOG, 0.5)]
    theirs = [
        (FORWARD, None),
        (FORWARD, None),
        (ITEM, 0.125),
        (STEP, None),
        (("a.py:11", "backward"), None),
        (LOG, 0.6),
    ]
    of_save = replace(found("steps-differ"), step=4, cause=f"They save{OWN_NUMBER}")
    located = paths({5: mine}, {5: theirs}).located(of_save, None)
    assert located.where == "a.py:4"
    assert "what is saved depends on it (shows at a.py:9)" in located.cause


def test_of_rates_the_number_before_they_change_is_named() -> None:
    first = [(ITEM, 3.0), (RATES, [0.1]), (LOG, 0.5), (STEP, None)]
    other = [(ITEM, 4.0), (RATES, [0.2]), (LOG, 0.6), (STEP, None)]
    assert paths({1: first}, {1: other}).located(found("learning-rate-differs"), None).where == "a.py:4"
    same = [(ITEM, 4.0), (RATES, [0.1]), (LOG, 0.6), (STEP, None)]
    assert paths({1: first}, {1: same}).located(found("learning-rate-differs"), None).where == "a.py:9"


def test_numbers_that_leave_tensors_are_kept_with_their_lines(tmp_path: Path) -> None:
    rates = [0.1]
    trace = PathTrace(TraceWriter(tmp_path, 0), lambda: list(rates))
    trace.enter()
    if torch.ones(1).sum() > 2:
        raise AssertionError
    trace.close(0)
    rates[0] = 0.2
    torch.ones(2).tolist()
    torch.arange(2).tolist()  # places of samples, perhaps
    trace.end(1)
    (event,) = read(tmp_path, 0)
    told = torch.load(value_path(tmp_path, 0, event["kept"]), weights_only=False)
    names = [place[1] for place in told["places"]]
    windows = {number: [(names[place], value) for place, value in one] for number, one in told["windows"].items()}
    assert ("__bool__", False) in windows[0]
    assert windows[1] == [
        ("learning rates", [0.2]),
        ("ones", None),
        ("tolist", [1.0, 1.0]),
        ("arange", None),
        ("tolist", None),
    ]


SCRIPT = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 3))
    loader = DataLoader(data, 16 // world, sampler=DistributedSampler(data, shuffle=False))
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, total = 0.0, 0.0
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        {decide}
        total += loss.item()
    dist.destroy_process_group()
"""
DECISIONS = {
    "a skipped step": """size = loss.detach()
        size = size.item()
        if size < 1.5:
            optimizer.step()""",
    "a rate": """optimizer.step()
        seen += loss.item()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + seen)""",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def make(name: str) -> Report:
        path = folder / f"{name.replace(' ', '-')}.py"
        path.write_text(script(name))
        return samestep.verify(path)

    return Lazily(make).__getitem__


def script(name: str) -> str:
    return textwrap.dedent(SCRIPT).replace("{decide}", DECISIONS[name].replace("        ", "    "))


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("a skipped step", "steps-differ", "size.item()"),
        pytest.param("a rate", "learning-rate-differs", "seen += loss.item()", marks=pytest.mark.prove),
    ],
)
def test_the_number_that_a_rank_decides_by_is_named(
    reports: Callable[[str], Report], name: str, code: str, line: str
) -> None:
    error = next(one for one in reports(name).errors if one.code == code)
    assert error.where is not None
    assert line in script(name).splitlines()[int(error.where.rpartition(":")[2]) - 1]


@pytest.mark.parametrize(("steps", "again", "elsewhere"), [(3, 3, False), (3, 4, True)])
def test_ranks_that_end_by_a_clock_end_elsewhere_later(steps: int, again: int, *, elsewhere: bool) -> None:
    def ranks(count: int) -> Record:
        return record(*([*(step(number, "g") for number in range(count)), ended()] for _ in range(2)))

    assert locating._end_elsewhere(ranks(steps), ranks(again)) is elsewhere
