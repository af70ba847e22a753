"""Ranks that hold stages are compared, together, with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.verification.claims import differences, unlike_replicas

ROOT = Path(__file__).parents[2]


def step(event: int, before: dict[str, str], gradients: dict[str, str], after: dict[str, str]) -> dict[str, Any]:
    return {"event": event, "parameters": before, "gradients": gradients, "after": after}


def ranks(**changed: Any) -> list[list[dict[str, Any]]]:
    """Two stages, whose ranks both hold the whole model beside: what is another stage's stays there as it was."""
    first = [
        step(0, {"model 1: a": "a0", "model 1: b": "b0"}, {"model 1: a": "ga0"}, {"model 1: a": "a1"}),
        step(1, {"model 1: a": "a1", "model 1: b": "b0"}, {"model 1: a": "ga1"}, {"model 1: a": "a2"}),
    ]
    second = [
        step(0, {"model 1: b": "b0", "model 1: a": "a0"}, {"model 1: b": "gb0"}, {"model 1: b": "b1"}),
        step(1, {"model 1: b": "b1", "model 1: a": "a0"}, {"model 1: b": "gb1"}, {"model 1: b": "b2"}),
    ]
    second[1] |= changed
    return [first, second]


ALONE = [
    step(0, {"a": "a0", "b": "b0"}, {"a": "ga0", "b": "gb0"}, {"a": "a1", "b": "b1"}),
    step(1, {"a": "a1", "b": "b1"}, {"a": "ga1", "b": "gb1"}, {"a": "a2", "b": "b2"}),
]


def test_stages_that_are_together_what_one_process_is_are_the_same() -> None:
    assert list(differences(ranks(), ALONE, parts=True)) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"gradients": {"b": "other"}}, [(1, "b", "have other bits in b")]),
        ({"after": {"b": "other"}}, [(1, "b", "have other bits in b")]),
        ({"parameters": {"b": "other"}}, [(1, "b", "have other bits in b")]),
        ({"after": None}, [(1, "b", "do not train the same parameters: no stage has b")]),
    ],
)
def test_other_bits_and_missing_parameters_are_found(changed: dict[str, Any], found: list[Any]) -> None:
    assert list(differences(ranks(**changed), ALONE, parts=True)) == found


def test_steps_that_only_one_side_has_taken_are_not_compared() -> None:
    assert list(differences([steps[:1] for steps in ranks()], ALONE, parts=True)) == []


TRAIN = """
import samestep, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
with samestep.world(pipeline=2) as world:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    plan = samestep.plan_pipeline(model, data[:8], F.cross_entropy, repeats=1)
    stage = samestep.pipeline(model, world, plan)
    optimizer = torch.optim.AdamW(stage.parameters())
    for batch in samestep.shards(data, world, batch_size=8):
        stage.step(batch)
        {between}
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("between", "codes"),
    [
        ("samestep.clip_grad_norm_(stage, 0.1)", []),
        # each stage by the norm of its own gradients
        pytest.param(
            "nn.utils.clip_grad_norm_(stage.parameters(), 0.01)",
            ["pipeline-inexact", "gradient-differs"],
            marks=pytest.mark.prove,
        ),
        pytest.param(
            "[each.grad.mul_(1 + world.rank) for each in stage.parameters()]",
            ["pipeline-inexact"],
            marks=pytest.mark.prove,
        ),
    ],
)
def test_a_pipeline_is_the_same_training_or_what_it_does_is_found(
    tmp_path: Path, between: str, codes: list[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN.format(between=between), encoding="utf-8")
    report = samestep.verify(path)
    assert [finding.code for finding in report.errors] == codes
    assert report.verdict == ("different" if codes else "same"), report
    if not codes:
        assert report.coverage["pipeline"] == report.coverage["gradients"] == "identical"
        assert "2 stages and one process have the same bits" in report.margins["pipeline"]


def test_ranks_that_step_one_parameter_must_agree() -> None:
    first, second = ranks()
    assert list(unlike_replicas([first, second, *ranks()])) == []
    other = ranks(after={"model 1: b": "other"})
    assert list(unlike_replicas([first, second, *other])) == [(1, "b", (1, 3))]


@pytest.mark.parametrize(
    ("between", "said"),
    [
        pytest.param("", None, marks=pytest.mark.prove),
        ("[each.grad.mul_(world.data.size) for each in stage.parameters()]", "away from that of one process"),
    ],
)
def test_replicas_of_a_pipeline_are_compared_with_whole_batches_in_float64(
    tmp_path: Path, between: str, said: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN.format(between=between), encoding="utf-8")
    report = samestep.verify(path, ranks=4)
    if said is None:
        assert report.verdict == "same", report
        assert "2 replicas of 2 stages and one process with whole batches, in float64" in report.margins["pipeline"]
    else:
        assert [finding.code for finding in report.errors] == ["pipeline-inexact"]
        assert said in report.errors[0].cause


DEVICES = """
import samestep, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
with samestep.world() as world:
    first = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout({p}))
    stages = [first, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))]
    stage = samestep.pipeline(stages, world, loss_fn=F.cross_entropy, micro_batches=2, devices=["cpu", "cpu"])
    optimizer = torch.optim.AdamW(stage.parameters())
    for batch in samestep.shards(data, world, batch_size=8):
        stage.step(batch)
        {between}
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("p", "between", "codes"),
    [
        pytest.param(0.3, "samestep.clip_grad_norm_(stage, 0.1)", [], marks=pytest.mark.prove),
        # on each device by the norm of the gradients there
        (
            0.0,
            "[nn.utils.clip_grad_norm_(part.parameters(), 0.01) for part in stage.parts.values()]",
            ["pipeline-inexact"],
        ),
    ],
)
def test_stages_that_one_process_holds_are_compared_with_one_device(
    tmp_path: Path, p: float, between: str, codes: list[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(DEVICES.format(p=p, between=between), encoding="utf-8")
    report = samestep.verify(path)
    assert [finding.code for finding in report.errors] == codes, report
    assert report.verdict == ("different" if codes else "same"), report
    if not codes:
        assert report.coverage["pipeline"] == "identical"
        assert "2 stages of a process, each on its device, and one stage on one device" in report.margins["pipeline"]


def test_stages_by_hand_are_judged_like_planned_ones(tmp_path: Path) -> None:
    text = (
        DEVICES.format(p=0.3, between="")
        .replace("world()", "world(pipeline=2)")
        .replace(', devices=["cpu", "cpu"]', "")
    )
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    report = samestep.verify(path)
    assert report.verdict == "same", report
    assert report.coverage["pipeline"] == "identical"
