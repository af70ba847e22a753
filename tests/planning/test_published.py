"""What docs/plan.md predicts of published trainings is what is computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published import BATCH, HOROVOD, Rings, inception, vgg16

from samestep.planning import replicas
from samestep.planning.offered import Offered
from samestep.planning.step import Way
from samestep.schedule.choose import named
from samestep.schedule.simulate import Costs, simulate

PAGE = (Path(__file__).parents[2] / "docs/plan.md").read_text()


def told(row: str) -> float:
    """The figure in the third column of a row of the page."""
    found = re.search(rf"\| {re.escape(row)} \| [^|]+ \| ([\d.]+) ", PAGE)
    assert found is not None, row
    return float(found[1])


@pytest.mark.parametrize(
    ("row", "profile", "ranks"),
    [
        ("Horovod, VGG-16, 128 GPUs", vgg16, 128),
        ("Horovod, VGG-16, 512 GPUs", vgg16, 512),
        ("Horovod, Inception V3, 512 GPUs", inception, 512),
    ],
)
def test_the_efficiencies_of_horovod(row, profile, ranks):
    one = profile()
    step = replicas.step(one, Rings(Offered(HOROVOD)), Way(ranks), batch=BATCH * ranks)
    assert told(row) == round(100 * one.step_s / step.seconds)


@pytest.mark.parametrize(("parts", "row"), [(1, "whole batches"), (6, "6 micro-batches"), (10, "10 micro-batches")])
def test_the_tutorials_pipeline(parts, row):
    each = 3.75 / 3 / parts / 6  # forward, and both halves of the backward, of each of two stages
    seconds = simulate(named("fill-drain", 2, parts), Costs([each] * 2, [each] * 2, [each] * 2)).seconds
    assert told(f"ResNet-50 in 2 stages, {row}") == round(3 * seconds, 2)


def test_vgg_has_as_many_parameters_as_is_known():
    assert vgg16().parameter_bytes == 4 * 138_357_544
