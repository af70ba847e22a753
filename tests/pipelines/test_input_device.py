"""Batches go to the device of the first stage, and not first to one that another process computes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import samestep
from samestep.data.current_step import StepReport
from samestep.pipelines import pipeline as module
from samestep.pipelines.pipeline import Pipeline
from samestep.runtime.scalar_sums import StepTag

FIRST, SECOND = torch.device("meta"), torch.device("cpu")  # "meta" stands for a card: it is not the host


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(3), torch.tensor(0))] * 8)


def samples():
    return TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize("make", [samples, Stream])
@pytest.mark.parametrize("weight", [None, lambda batch: len(batch[0])])
def test_batches_of_shards_arrive_where_the_first_stage_is(monkeypatch, make, weight):
    """Also of shards that were made before the pipeline."""
    monkeypatch.setattr(module, "resolve_devices", lambda *_: (FIRST, SECOND))
    with samestep.world(device="cpu") as world:
        batches = samestep.shards(make(), world, batch_size=4, weight=weight)
        stage = Pipeline(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
            world,
            F.cross_entropy,
            ends=(1, 2),
            devices=[FIRST, SECOND],
        )
        assert world.input_device == stage.devices[0] == FIRST
        assert world.device == SECOND
        assert [x.device.type for x, _ in batches] == ["meta"] * 2


def test_a_pipeline_without_devices_leaves_them_on_the_worlds():
    with samestep.world(device="cpu") as world:
        Pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), world, F.cross_entropy, ends=(2,))
        assert world.input_device == world.device


def test_a_loss_on_the_host_is_reported_on_the_device(monkeypatch):
    """A pipeline's is on the host, whatever its stages compute on."""
    with samestep.world(device="cpu") as world:
        monkeypatch.setattr(world, "device", FIRST)
        devices = []
        monkeypatch.setattr(type(world.data), "start_device_sum", lambda _, values: devices.append(values.device))
        report = StepReport(world)
        report.add(torch.ones(1, dtype=torch.float64))
        report.add(torch.ones(1, dtype=torch.float64))
        report.send(StepTag("report", 0, 0, 0))
        assert devices == [FIRST]
