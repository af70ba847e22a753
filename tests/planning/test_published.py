"""What docs/plan.md predicts of published trainings is what is computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published import BATCH, DGX, HOROVOD, ONE_CARD, RESNETS, inception, resnet, vgg16

from samestep.planning import data_parallel
from samestep.planning.fabric import ClusterFabric
from samestep.planning.step import ParallelLayout
from samestep.schedule.algorithms import make_schedule
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
    step = data_parallel.predict(one, ClusterFabric(HOROVOD, only="ring"), ParallelLayout(ranks), batch=BATCH * ranks)
    assert told(row) == round(100 * one.step_s / step.seconds)


@pytest.mark.parametrize("name", RESNETS)
def test_the_steps_of_pytorchs_benchmark(name):
    step = data_parallel.predict(resnet(name), ClusterFabric(DGX, only="ring"), ParallelLayout(16), batch=32 * 16)
    row = f"PyTorch's DDP, {name}, 16 GPUs"
    assert told(row) == round(1000 * step.seconds)
    published = float(re.search(rf"{row} \| (\d+) ms", PAGE)[1])
    assert 0.93 < told(row) / published < 1


def test_what_overlapping_saves():
    one, fabric = resnet("ResNet-50"), ClusterFabric(ONE_CARD, only="ring")
    step = data_parallel.predict(one, fabric, ParallelLayout(32), batch=32 * 32)
    (ring,) = fabric.all_reduces(32, 1, one.parameter_bytes)
    behind = one.step_s + ring.link.seconds(one.parameter_bytes)
    assert told("PyTorch's DDP, ResNet-50, 32 GPUs: overlapping saves") == round(100 * (1 - step.seconds / behind))


@pytest.mark.parametrize(("parts", "row"), [(1, "whole batches"), (6, "6 micro-batches"), (10, "10 micro-batches")])
def test_the_tutorials_pipeline(parts, row):
    each = 3.75 / 3 / parts / 6  # forward, and both halves of the backward, of each of two stages
    seconds = simulate(make_schedule("fill-drain", 2, parts), Costs([each] * 2, [each] * 2, [each] * 2)).seconds
    assert told(f"ResNet-50 in 2 stages, {row}") == round(3 * seconds, 2)


def test_vgg_has_as_many_parameters_as_is_known():
    assert vgg16().parameter_bytes == 4 * 138_357_544
