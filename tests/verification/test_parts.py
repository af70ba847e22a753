"""Models that a script cuts over the ranks by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from journals import Event, step, stepped

from samestep.verification.journal import value_path
from samestep.verification.judging import parts
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.report import Report
from samestep.verification.runs import Ended

RIGHT = {name: torch.arange(1.0, 5.0) * number for number, name in enumerate(("up", "norm", "bias", "out", "head"), 1)}
OTHER = torch.tensor([3.0, 1.0, 0.5, 2.0])


def judged(
    folder: Path,
    used: dict[str, torch.Tensor],
    own: list[dict[str, torch.Tensor]],
    right: dict[str, torch.Tensor] = RIGHT,
    rate: float = 0.1,
) -> Report:
    """Two ranks, of whose parameters all but "up" begin with one process's numbers; it steps at this rate."""
    digests = {name: "of the rank" if name == "up" else name for name in right}
    ranks = []
    for number, brought in enumerate(own):
        value_path(folder, number, 1).parent.mkdir(parents=True)
        torch.save(used, value_path(folder, number, 1))
        torch.save(brought, value_path(folder, number, 2))
        start: Event = {"kind": "start", "parameters": digests}
        ranks.append(Rank(number, [start, step(0, "g", kept=1, own=2), stepped(0)]))
    alone = folder / "alone"
    value_path(alone, 0, 1).parent.mkdir(parents=True)
    torch.save(right, value_path(alone, 0, 1))
    rates: Event = {"kind": "rates", "event": 0, "optimizer": 0, "rates": [rate]}
    alike = {name: name for name in right}
    events: list[Event] = [{"kind": "own_digests", "parameters": alike}, rates, step(0, "g", kept=1)]
    run = Run(Ended(code=0, hung=False, failure=None, folder=alone), Record(alone, [Rank(0, events)]))
    report = Report(ranks=2)
    parts.judge(Record(folder, ranks), run, report)
    return report


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({}, None),
        ({"up": OTHER}, None),  # a part of it, which has other numbers
        ({"norm": 0.25 * RIGHT["norm"]}, "gradients-not-synchronised"),  # what this rank's stretch brings
        ({"norm": 2 * RIGHT["norm"]}, "gradient-scale"),
        ({"norm": OTHER}, None),  # nobody knows why
        ({"norm": OTHER, "bias": OTHER, "out": OTHER}, None),  # the parts that are not seen differ
    ],
)
def test_a_gradient_that_is_not_one_process_s_is_found_among_those_that_are(
    tmp_path: Path, wrong: dict[str, torch.Tensor], code: str | None
) -> None:
    own = [{name: share * one for name, one in RIGHT.items()} for share in (0.25, 0.75)]
    found = judged(tmp_path, RIGHT | wrong, own).findings
    assert [(one.code, one.tensor) for one in found] == ([] if code is None else [(code, "norm")])


@pytest.mark.parametrize(("rate", "count"), [(0.1, 1), (0.2, 0)])
def test_gradients_that_are_twice_one_process_s_are_wrong_however_many_they_are(
    tmp_path: Path, rate: float, count: int
) -> None:
    """Those of experts, which see the samples of all ranks; at half of one process's rate they may be meant."""
    experts = {f"expert.{number}": torch.arange(2.0, 6.0) for number in range(5)}
    used = RIGHT | {name: 2 * one for name, one in experts.items()}
    found = judged(tmp_path, used, [used] * 2, RIGHT | experts, rate).findings
    assert [(one.code, one.tensor, one.factor) for one in found] == [("gradient-scale", "expert.0", 2.0)] * count
