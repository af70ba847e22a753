"""Gradients that are NaN, or infinite: on both sides the trainings are alike as far as they go, on one they are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from journals import Event, trained

from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.judging.reference import Comparison
from samestep.verification.report import Report

NAN = math.nan


def run(folder: Path, gradients: Sequence[float], more: Sequence[Event] = (), first: float = 1.0) -> Run:
    """One process, or the first of several: of each step a gradient of two numbers, the first always the same."""
    return trained(folder, [torch.tensor([first, gradient]) for gradient in gradients], more)


def judged(
    folder: Path,
    ranks: Sequence[float],
    alone: Sequence[float],
    again: Sequence[float] = (),
    more: Sequence[Event] = (),
) -> Report:
    first = run(folder / "ranks", ranks, more).record.ranks[0]
    whole, permuted = run(folder / "alone", alone), run(folder / "again", again or alone)
    report = Report(ranks=2)
    other = Rank(1, [{**event, "kept": None} for event in first.events])
    record = Record(folder / "ranks", [first, other])
    Comparison(record, whole, Others(lambda: permuted, lambda: [run(folder / "part", [])])).judge(report)
    return report


def test_nan_on_the_ranks_alone_is_an_error_that_names_the_step(tmp_path: Path) -> None:
    """A rank without a single item has divided 0 by 0."""
    (error,) = judged(tmp_path, [2.0, NAN], [2.0, 2.0]).errors
    assert (error.code, error.step, error.tensor, error.where) == ("gradient-differs", 1, "w", "train.py:25")
    assert "not finite (NaN, or infinite) on the ranks, and is in one process" in error.cause


def test_nan_in_one_process_alone_is_an_error(tmp_path: Path) -> None:
    (error,) = judged(tmp_path, [2.0, 2.0], [2.0, math.inf]).errors
    assert "not finite (NaN, or infinite) in one process, and is on the ranks" in error.cause


def test_a_hook_that_overflows_is_named(tmp_path: Path) -> None:
    hook = {"kind": "hook", "name": "fp16_compress_hook", "where": "train.py:12"}
    (error,) = judged(tmp_path, [math.inf], [2.0], more=[hook]).errors
    assert (error.where, "fp16_compress_hook reduces them" in error.cause) == ("train.py:12", True)


def test_nan_on_both_sides_ends_the_comparison(tmp_path: Path) -> None:
    report = judged(tmp_path / "late", [2.0, NAN], [2.0, NAN])
    assert (report.coverage["gradients"], report.margins["gradients"]) == (
        "agrees",
        "worst error 0.0e+00 of a tensor's norm, 1 step",
    )
    (remark,) = report.remarks
    assert remark.startswith("from step 1 on gradients are not finite, on the ranks and in one process alike")
    assert judged(tmp_path / "early", [NAN], [NAN]).coverage["gradients"].startswith("not checked: from step 0 on")


def test_a_step_before_is_judged_first(tmp_path: Path) -> None:
    (error,) = judged(tmp_path, [4.0, NAN], [2.0, NAN]).errors
    assert error.step == 0


def test_a_floor_that_is_not_finite_excuses_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path / "1", [40.0], [2.0], again=[NAN]).coverage["gradients"].startswith("not checked: rounding")
    assert judged(tmp_path / "2", [2.4], [2.0], again=[3.0]).coverage["gradients"].startswith("not checked: rounding")
    assert judged(tmp_path / "3", [9.0], [2.0], again=[3.0]).coverage["gradients"].startswith("not checked: rounding")


def test_what_is_too_coarse_to_be_judged_is_no_worst_error(tmp_path: Path) -> None:
    """It is told of the steps that were judged."""
    report = judged(tmp_path, [2.0003, 2.4], [2.0, 2.0], again=[2.0001, 3.0])
    assert report.coverage["gradients"] == "agrees"
    assert report.margins["gradients"].startswith("worst error 1.3e-04 of a tensor's norm, rounding explains 8.9e-04")
