"""What is told of the buffers with which ranks evaluate."""

from __future__ import annotations

import math

import pytest
import torch
from journals import ended, record

from samestep.runtime.digest import digest
from samestep.verification import journal
from samestep.verification.judging import evaluation
from samestep.verification.recording.evaluations import Evaluations
from samestep.verification.recording.inputs import Inputs
from samestep.verification.report import Report


def test_buffers_are_told_again_when_a_pass_is_evaluated_whole(tmp_path) -> None:
    """The first forward may still bring those of rank 0, and whoever loads ahead has two batches before it."""
    mean = torch.zeros(2)
    book = journal.Journal(tmp_path, 0)
    model = Inputs(book, lambda: None)
    evaluations = Evaluations(book, lambda: {"mean": mean}, model)
    for index in (0, 1):
        evaluations.batch("train.py:9#1", 0, index)
        model.used = True
    mean += 1  # the first forward
    evaluations.passed("train.py:9#1", 0)
    evaluations.leave()
    told = [event["digests"]["mean"] for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]
    assert told == [digest(torch.zeros(2)), digest(torch.ones(2))]
    evaluations.end()
    assert len([event for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]) == 2


def test_buffers_of_a_model_that_is_not_called_are_not_told(tmp_path) -> None:
    """Another model is evaluated, or its statistics are made: a pass without gradients alone says nothing."""
    book = journal.Journal(tmp_path, 0)
    evaluations = Evaluations(book, lambda: {"mean": torch.zeros(2)}, Inputs(book, lambda: None))
    for index in (0, 1):
        evaluations.batch("train.py:9#1", 0, index)
    evaluations.passed("train.py:9#1", 0)
    evaluations.end()
    assert not [event for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]


def evaluated(value: float, **more: object) -> dict[str, object]:
    """What samestep.evaluate has returned."""
    return {"kind": "metrics", "window": 200, "where": "train.py:22", "metrics": {"accuracy": value}, **more}


def test_an_evaluation_of_other_weights_is_not_held_against_the_ranks() -> None:
    """One process that has gone on by itself has weights of its own, by rounding: here a sample of 1,009 more."""
    for placed, codes in ((True, ["evaluation-inexact"]), (False, [])):
        told = Report(ranks=2, steps=400)
        evaluation.judge(
            record([evaluated(0.915758), ended()], [ended()]),
            record([evaluated(0.914767, placed=placed), ended()]),
            told,
        )
        assert [finding.code for finding in told.findings] == codes


@pytest.mark.parametrize(
    ("mine", "theirs", "codes"),
    [
        (math.nan, math.nan, []),
        (math.inf, math.inf, []),
        (math.nan, 0.5, ["evaluation-inexact"]),
        (math.inf, 0.5, ["evaluation-inexact"]),
        (0.5, -math.inf, ["evaluation-inexact"]),
    ],
)
def test_metrics_that_are_not_finite_are_compared(mine: float, theirs: float, codes: list[str]) -> None:
    """A score of a class that is nowhere is 0/0, on the ranks as in one process."""
    told = Report(ranks=2, steps=400)
    evaluation.judge(record([evaluated(mine), ended()], [ended()]), record([evaluated(theirs), ended()]), told)
    assert [finding.code for finding in told.findings] == codes
    assert told.coverage["evaluation"] == ("refuted" if codes else "agrees")
