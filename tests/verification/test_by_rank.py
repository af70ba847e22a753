"""Gradients beside what one process makes of each rank's samples alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from journals import Event, record, trained

from samestep.verification.judging import average
from samestep.verification.report import Report

ONE, OTHER = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, -1.0, 0.0, 2.0])
WHY = "their shapes differ"


def mean(count: float, factor: float = 1.0) -> dict[str, object]:
    return {"factor": factor, "mean": True, "count": count, "shape": [int(count)]}


def sum_of(items: float) -> dict[str, object]:
    return {"factor": 1 / items, "mean": False, "count": None, "shape": [8, 16]}


@pytest.mark.parametrize(
    ("most", "used", "said"),
    [
        (2.0, 0.25 * ONE + 0.25 * OTHER, "agrees as declared"),  # half of the mean
        (2.0, 0.5 * ONE + 0.5 * OTHER, "gradient-scale"),
        (4.0, 0.5 * ONE + 0.5 * OTHER, "agrees as declared"),
    ],
)
def test_a_mean_of_the_ranks_gradients_may_be_clipped(
    tmp_path: Path, most: float, used: torch.Tensor, said: str
) -> None:
    loss: Event = {"kind": "loss", "event": 0, "terms": [mean(8)]}
    runs = [trained(tmp_path / str(rank), [one], [loss]) for rank, one in enumerate((ONE, OTHER))]
    clip: Event = {"kind": "clip", "window": 0, "norm": 4.0, "most": most, "where": "train.py:28"}
    ours, report = trained(tmp_path / "ranks", [used], [clip]).record, Report(ranks=2)
    ours = replace(ours, ranks=[ours.ranks[0], *record(list(ours.ranks[0].events)).ranks])
    average.judge_by_rank(ours, runs, ours.ranks[0].steps, report, WHY)
    assert [*(one.code for one in report.errors), report.coverage["gradients"].partition(":")[0]][0] == said


@pytest.mark.parametrize(("times", "said"), [(1.0, "agrees as declared"), (0.5, "gradient-scale")])
def test_parts_of_the_sum_over_the_samples_of_all_ranks_count_once(tmp_path: Path, times: float, said: str) -> None:
    """Each loss is a sum that is divided by the batch of all ranks."""
    loss: Event = {"kind": "loss", "event": 0, "terms": [sum_of(32)]}
    runs = [trained(tmp_path / str(rank), [one], [loss]) for rank, one in enumerate((ONE, OTHER))]
    batch: Event = {"kind": "batch", "window": 0, "size": 16, "training": True}
    ours, report = trained(tmp_path / "ranks", [times * (ONE + OTHER)], [batch]).record, Report(ranks=2)
    ours = replace(ours, ranks=[ours.ranks[0], *record(list(ours.ranks[0].events)).ranks])
    average.judge_by_rank(ours, runs, ours.ranks[0].steps, report, WHY)
    assert [*(one.code for one in report.errors), report.coverage["gradients"].partition(":")[0]][0] == said


@pytest.mark.parametrize(
    ("used", "terms", "said"),
    [
        (0.5 * ONE + 0.5 * OTHER, ([mean(8)], [mean(8)]), "agrees as declared"),
        (0.5 * ONE + 0.5 * OTHER, ([mean(8)], [mean(4)]), "gradient-differs"),  # a mean of means
        (0.75 * ONE + 0.25 * OTHER, ([sum_of(30)], [sum_of(10)]), "agrees as declared"),  # over all ranks' tokens
        (0.5 * ONE + 0.5 * OTHER, ([sum_of(30)], [sum_of(10)]), "gradient-differs"),
        (ONE + OTHER, ([mean(8)], [mean(8)]), "gradient-scale"),
        (0.5 * ONE + 0.5 * OTHER, ([mean(8, 0.3), mean(8, 0.7)], [mean(8, 0.6), mean(8, 0.4)]), "agrees as declared"),
        (0.75 * ONE + 0.25 * OTHER, ([], []), "agrees as declared"),  # weighed by something, and together once
        (0.5 * ONE + 0.5 * OTHER, ([], []), "not checked"),
        (torch.tensor([5.0, -1.0, 1.0, 7.0]), ([mean(8)], [mean(8)]), "not checked"),
        (0 * ONE, ([mean(8)], [mean(8)]), "not checked"),
    ],
)
def test_the_ranks_gradient_is_a_mean_weighed_by_values(
    tmp_path: Path, used: torch.Tensor, terms: tuple[list[object], list[object]], said: str
) -> None:
    runs = []
    for rank, (gradient, told) in enumerate(zip((ONE, OTHER), terms, strict=True)):
        loss: Event = {"kind": "loss", "event": 0, "terms": told}
        run = trained(tmp_path / str(rank), [gradient if used.any() else used], [loss])
        runs.append(run)
    ours, report = trained(tmp_path / "ranks", [used]).record, Report(ranks=2)
    ours = replace(ours, ranks=[ours.ranks[0], *record(list(ours.ranks[0].events)).ranks])
    average.judge_by_rank(ours, runs, ours.ranks[0].steps, report, WHY)
    assert [one.code for one in report.errors] == ([said] if said.startswith("gradient") else [])
    assert report.errors or report.coverage["gradients"].partition(":")[0] == said
