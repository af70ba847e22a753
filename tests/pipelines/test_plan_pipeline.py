"""A plan is the fastest of all that were asked for, by layers that were measured."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from known_layers import Clock, Takes
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import UsageError
from samestep.pipelines import plan as module
from samestep.pipelines.build import pipeline
from samestep.pipelines.layers import Device, Link
from samestep.pipelines.plan import plan_pipeline
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK

BATCH = torch.ones(96, 5), torch.ones(96, 5)


@pytest.fixture
def chain(monkeypatch):
    """Makes a model of layers that take 1 second forward and 2 backward, on a clock of their own."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    return lambda count: nn.Sequential(*(Takes(clock, number + 1, 1.0, 1.0, 1.0) for number in range(count)))


def test_a_plan_says_what_a_step_takes(chain):
    """Layer 0 takes 2 seconds and not 3: nobody wants the gradients of the batch."""
    plan = plan_pipeline(chain(6), BATCH, F.mse_loss, micro_batches=6, schedule="fill-drain", repeats=1)
    assert plan.ends == (3, 6)
    assert plan.alone == 6 * 17
    assert plan.seconds == plan.bound == (3 + 5) + (3 + 6) + 5 * (3 + 6)
    text = str(plan)
    assert "2 stages, fill-drain, 6 micro-batches of 16 samples" in text
    assert "stage 0   0 to 2: forward 3000.00 ms, backward 5000.00 ms, sends 0.00 MB" in text
    assert "predicted 62000.0 ms a step, 1.65 times as quick as one device; 18 % idle; no other cut is better" in text
    assert "passes" not in text  # all took the same
    unsteady = replace(plan, layers=tuple(replace(layer, spread=0.17) for layer in plan.layers))
    assert "half of the passes that were measured lay within 6 % of these times" in str(unsteady)


def test_micro_batches_and_schedule_are_chosen(chain):
    """Layers that take as long for any size: one micro-batch is best. Of eight, the schedule with the least bubble."""
    assert plan_pipeline(chain(4), BATCH, F.mse_loss, repeats=1).micro_batches == 1
    best = plan_pipeline(chain(4), BATCH, F.mse_loss, micro_batches=8, repeats=1)
    others = {
        name: plan_pipeline(chain(4), BATCH, F.mse_loss, micro_batches=8, schedule=name, repeats=1).seconds
        for name in ("fill-drain", "1f1b", "eager-1f1b", "zero-bubble")
    }
    assert best.seconds == min(others.values()) < others["fill-drain"]
    assert others[best.schedule] == best.seconds


def test_devices_and_links_count(chain):
    def planned(**options):
        return plan_pipeline(chain(8), BATCH, F.mse_loss, micro_batches=8, repeats=1, **options)

    assert planned(devices=[Device(), Device(speed=3)]).ends[0] < planned().ends[0]
    assert planned(link=Link(latency=1.0)).seconds > planned().seconds


def test_an_interleaved_plan_has_several_stages_on_each_rank(chain):
    plan = plan_pipeline(chain(8), BATCH, F.mse_loss, micro_batches=6, schedule="interleaved", repeats=1)
    assert (plan.ranks, len(plan.ends)) == (2, 2 * plan.stages_per_rank)
    text = str(plan)
    assert f"{len(plan.ends)} stages, {plan.stages_per_rank} on each of 2 ranks, interleaved, 6 micro-batches" in text
    assert "stage 2 on rank 0   " in text
    assert plan.seconds_of(96, 6) == plan.seconds
    with pytest.raises(UsageError, match="4 stages of 3 layers: a stage must have one layer at least"):
        plan_pipeline(chain(3), BATCH, F.mse_loss, micro_batches=6, schedule="interleaved", repeats=1)


@pytest.mark.parametrize(("latency", "faster", "chosen"), [(0.01, 1, 1), (0.2, 1, 0), (3.0, 0, 0)])
def test_interleaving_is_chosen_where_it_is_faster_also_with_messages_twice_as_long(
    monkeypatch, latency, faster, chosen
):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    model = nn.Sequential(*(Takes(clock, number + 1, 1.0, 1.5, 0.5) for number in range(8)))

    def planned(**options):
        return plan_pipeline(model, BATCH, F.mse_loss, micro_batches=4, repeats=1, **options)

    best = planned(link=Link(latency=latency))
    every = {
        name: planned(link=Link(latency=latency), schedule=name).seconds
        for name in (*ONE_STAGE_PER_RANK, "interleaved")
    }
    assert best.seconds == every[best.schedule] == best.tried[4]
    assert (min(every, key=every.__getitem__) == "interleaved") == faster
    assert (best.schedule == "interleaved") == chosen
    assert chosen or best.seconds == min(every[name] for name in ONE_STAGE_PER_RANK)
    assert planned().schedule != "interleaved"  # what its messages take is not known


def test_a_schedule_that_does_not_fit_gives_way_to_one_that_does():
    model = nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(5, 5), *(nn.Tanh() for _ in range(4)))

    def planned(**options):
        return plan_pipeline(model, BATCH, F.mse_loss, micro_batches=8, repeats=1, **options)

    layers = planned(schedule="1f1b").layers
    memory = 4 * sum(layer.parameters for layer in layers) + 2 * sum(layer.saved for layer in layers)
    with pytest.raises(UsageError, match="no cut into 2 stages fits|layer 4 takes"):
        planned(schedule="fill-drain", devices=[Device(memory=memory)] * 2)
    assert planned(devices=[Device(memory=memory)] * 2).schedule != "fill-drain"


def test_a_plan_is_drawn_beside_one_device_and_one_stream(chain, monkeypatch):
    drawn = []
    monkeypatch.setattr(module, "draw", lambda timelines, *_: drawn.append(timelines))
    options = {"micro_batches": 4, "schedule": "1f1b", "link": Link(latency=0.5), "repeats": 1}
    plan = plan_pipeline(chain(4), BATCH, F.mse_loss, **options)
    plan.gantt("plan.png")
    plan.gantt("plan.png", compared=True)
    assert list(drawn[0]) == ["predicted, 1f1b"]
    assert list(drawn[1]) == ["one device", "2 devices, one stream", "2 devices, two streams", "predicted, 1f1b"]
    one, copied, beside, _ = drawn[1].values()
    assert one.seconds == plan.alone > copied.seconds > beside.seconds


def test_another_batch_and_split_size_is_answered_by_t_of_b(monkeypatch):
    """96 : 16 against 120 : 20. Both have 6 micro-batches and as much bubble; what starting a kernel takes decides."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)

    def model(each):
        return nn.Sequential(*(Takes(clock, number + 1, 1.0, 1.0, 1.0, each=each) for number in range(6)))

    plan = plan_pipeline(model(0.1), BATCH, F.mse_loss, schedule="fill-drain", repeats=1)
    for samples, size in ((96, 16), (120, 20), (40, 40)):
        count, cost = samples // size, 1 + 0.1 * size
        expected = cost * ((3 + 5) + (3 + 6) + (count - 1) * (3 + 6))
        assert plan.ends == (3, 6)
        assert plan.seconds_of(samples, count) == pytest.approx(expected, rel=1e-9)
    assert plan.seconds_of(120, 6) / 120 < plan.seconds_of(96, 6) / 96
    assert plan.seconds_of(96, plan.micro_batches) == plan.seconds == plan.tried[plan.micro_batches]
    assert list(plan.tried) == [1, 2, 4, 8, 16]
    assert "ms a step by micro-batches  1: 180200.0, 2: " in str(plan)
    one = plan_pipeline(model(0.1), BATCH, F.mse_loss, micro_batches=6, repeats=1)
    with pytest.raises(UsageError, match="measured for micro-batches of 16 samples alone, and 20 are asked for"):
        one.seconds_of(120, 6)
    with pytest.raises(UsageError, match="4 samples in 5 micro-batches"):
        one.seconds_of(4, 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batches": 0}, "micro_batches=0 of a batch of 96 samples: give a whole number from 1 to 96, or 'auto'"),
        ({"micro_batches": 97}, "micro_batches=97 of a batch of 96 samples"),
        ({"micro_batches": "many"}, "micro_batches='many' of a batch"),
        ({"schedule": "gpipe", "micro_batches": 2}, "there is no schedule 'gpipe'"),
        ({"stages": 5, "micro_batches": 2}, "5 stages of 4 layers: a stage must have one layer at least"),
        ({"devices": [Device()]}, "1 devices for 2 stages: give one for each"),
    ],
)
def test_what_cannot_be_planned_is_refused(chain, options, said):
    with pytest.raises(UsageError, match=said):
        plan_pipeline(chain(4), BATCH, F.mse_loss, repeats=1, **options)


def test_a_layer_that_is_larger_than_a_device_is_named_with_what_it_takes():
    """Its weights and their gradients: 64 000 bytes each; one stage may hold what the other cannot."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2000), nn.Linear(2000, 8))
    sample = torch.ones(8, 8), torch.ones(8, 8)
    options = {"micro_batches": 2, "repeats": 1}
    with pytest.raises(UsageError, match=r"layer 1 takes [\d.]+ kB, and the largest device has 100 kB: make several"):
        plan_pipeline(model, sample, F.mse_loss, devices=[Device(memory=1e5)] * 2, **options)
    found = plan_pipeline(model, sample, F.mse_loss, devices=[Device(memory=1e5), Device(memory=1e6)], **options)
    assert found.ends == (1, 3)


@pytest.mark.parametrize("sample", [torch.ones(96, 5), (torch.ones(96, 5),), "ab"])
def test_a_sample_that_is_no_batch_is_refused(chain, sample):
    with pytest.raises(UsageError, match="not inputs and targets of a batch: give them in a tuple or list"):
        plan_pipeline(chain(4), sample, F.mse_loss, repeats=1)


def carried_out(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))  # an optimizer wants parameters of any stage
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(12, 16, generator=generator), torch.randn(12, 16, generator=generator)
    with samestep.world(pipeline=2) as world:
        plan = plan_pipeline(model, batch, F.mse_loss, micro_batches=4, repeats=1, **options)
        stage = pipeline(model, world, plan)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(float(stage.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, [name for name, _ in stage.named_parameters()]


def test_a_plan_is_carried_out_alike_on_all_ranks(two_ranks):
    (losses, first), (others, second) = two_ranks(carried_out)
    assert losses == others
    assert losses == sorted(losses, reverse=True)
    assert sorted(first + second) == sorted(f"{number}.{kind}" for number in range(6) for kind in ("weight", "bias"))


def several_a_rank():
    return carried_out(schedule="interleaved"), carried_out(schedule="1f1b")


def test_an_interleaved_plan_is_carried_out_with_the_same_bits(two_ranks):
    ((losses, first), straight), ((others, second), _) = two_ranks(several_a_rank)
    assert losses == others == straight[0]
    assert not set(first) & set(second)
    assert len(first + second) == 12
    assert first != straight[1]
