"""Every schedule on real ranks leaves the bits of one process that takes one micro-batch after another."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import ModelError
from samestep.pipelines.executor import ScheduleExecutor, Stage
from samestep.pipelines.transport import P2PChannel, RankTransport
from samestep.runtime.axis import Axis
from samestep.schedule.algorithms import forward_only, make_schedule
from samestep.testing import assert_same_bits

KINDS = "plain", "tuples"
OTHERS = "fill-drain", "eager-1f1b", "zero-bubble"
SIZES = [4, 4, 3, 3, 3]  # samples of the micro-batches: the last ones are smaller


def transport(plan, axis, device):
    """Messages over torch.distributed, though the ranks share memory."""
    others = {(axis.rank + step) % axis.size for step in (-1, 1)} - {axis.rank}
    return RankTransport(plan, axis, {other: P2PChannel(axis, other, device) for other in others})


class Two(nn.Module):
    """Gives a tensor, one that wants no gradient, and another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return self.linear(x), x.detach().argmax(dim=1), x.tanh()


class One(nn.Module):
    def forward(self, x, places, y):
        return x + y.roll(1, 0) * places[:, None].remainder(3)


def layers(kind):
    torch.manual_seed(0)
    if kind == "tuples":
        return [nn.Linear(6, 12), Two(), One(), nn.Linear(12, 12), nn.Tanh(), Two(), One(), nn.Linear(12, 3)]
    return [
        nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(),
        nn.Linear(12, 3),
    ]  # fmt: skip


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SIZES), 6, generator=generator)
    return x.split(SIZES), torch.randint(0, 3, (sum(SIZES),), generator=generator).split(SIZES)


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum") / sum(SIZES)


class Several(nn.Sequential):
    """Layers one after another, which hand on several tensors."""

    def forward(self, *given):
        for layer in self:
            given = layer(*given)
            given = given if isinstance(given, tuple) else (given,)
        return given if len(given) > 1 else given[0]


def alone(kind, steps):
    """What one process has after each step: gradients by the number of the layer, and the losses."""
    model, found = Several(*layers(kind)), []
    for step in range(steps):
        model.zero_grad()
        losses = []
        for x, y in zip(*data(step), strict=True):
            one = loss(model(x), y)
            one.backward()
            losses.append(one.detach())
        found.append(({name: each.grad.clone() for name, each in model.named_parameters()}, losses))
    return found


def piped(name, chunks, steps):
    """By kind of layers what this rank has after each step."""
    with samestep.world(pipeline=int(os.environ["WORLD_SIZE"])) as world:
        return {kind: steps_of(world, name, chunks, kind, steps) for kind in KINDS}


def steps_of(world, name, chunks, kind, steps):
    axis = world.pipeline
    plan = make_schedule(name, axis.size, len(SIZES), chunks)
    parts = torch.arange(8).tensor_split(plan.stages)
    own = {stage for stage, rank in enumerate(plan.placement) if rank == axis.rank}
    every = layers(kind)
    modules = {stage: Several(*(every[place] for place in parts[stage])) for stage in own}
    stages = {stage: Stage(stage, module) for stage, module in modules.items()}
    interpreter = ScheduleExecutor(plan, axis.rank, stages, transport(plan, axis, world.device))
    found = []
    for step in range(steps):
        x, y = data(step)
        for module in modules.values():
            module.zero_grad()
        given = interpreter.run(lambda n, x=x: (x[n],), lambda n, y=y: lambda out: loss(*out, y[n]), SIZES)
        losses = [each for (each,) in given]
        gradients = {
            f"{int(parts[stage][0]) + int(each.partition('.')[0])}.{each.partition('.')[2]}": parameter.grad.clone()
            for stage, module in modules.items()
            for each, parameter in module.named_parameters()
        }
        found.append((gradients, losses))
    return found


def check(results, steps):
    expected = {kind: alone(kind, steps) for kind in KINDS}
    for kind in KINDS:
        for step, (gradients, losses) in enumerate(expected[kind]):
            merged = {name: each for result in results for name, each in result[kind][step][0].items()}
            assert merged.keys() == gradients.keys()
            assert_same_bits(merged, gradients)
            (told,) = [result[kind][step][1] for result in results if result[kind][step][1]]
            assert_same_bits(dict(enumerate(told)), dict(enumerate(losses)))


@pytest.mark.parametrize("name", ["1f1b", *(pytest.param(name, marks=pytest.mark.prove) for name in OTHERS)])
def test_two_stages_leave_the_bits_of_one_process(two_ranks, name):
    check(two_ranks(piped, name, 1, 2), 2)


@pytest.mark.parametrize("name", ["zero-bubble", pytest.param("eager-1f1b", marks=pytest.mark.prove)])
def test_four_stages_leave_the_bits_of_one_process(four_ranks, name):
    check(four_ranks(piped, name, 1, 2), 2)


def test_two_stages_a_rank_leave_the_bits_of_one_process(two_ranks, three_ranks):
    check(two_ranks(piped, "interleaved", 4, 1), 1)
    check(three_ranks(piped, "interleaved", 2, 2), 2)


def evaluated():
    with samestep.world(pipeline=2) as world:
        plan = forward_only(2, len(SIZES))
        every = layers("plain")
        module = Several(*every[:4]) if world.rank == 0 else Several(*every[4:])
        interpreter = ScheduleExecutor(
            plan, world.rank, {world.rank: Stage(world.rank, module)}, transport(plan, world.pipeline, world.device)
        )
        x, y = data(0)
        given = interpreter.run(lambda n: (x[n],), lambda n: lambda out: loss(*out, y[n]), SIZES)
        found = [each for (each,) in given]
        assert all(parameter.grad is None for parameter in module.parameters())
        return found


def test_an_evaluation_gives_the_losses_of_one_process_and_no_gradients(two_ranks):
    first, last = two_ranks(evaluated)
    assert first == []
    assert_same_bits(dict(enumerate(last)), dict(enumerate(alone("plain", 1)[0][1])))


# --- what cannot be sent ---------------------------------------------------------------------


class Gives(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda x: {"hidden": x}, "stage 3 gives a dict: between stages a tensor can be sent, or several in a tuple"),
        (lambda x: (x, 3), "stage 3 gives a tuple with a int"),
        (lambda _: (), "stage 3 gives a tuple: between"),
        (lambda _: None, "stage 3 gives a NoneType: between"),
    ],
)
def test_what_is_no_tensor_is_named(what, said):
    with pytest.raises(ModelError, match=said):
        Stage(3, Gives(what)).forward(0, [torch.ones(2, 3)], [False])


def test_a_stage_that_changes_what_it_was_sent_is_named():
    stage = Stage(1, nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1)))
    with pytest.raises(ModelError, match="stage 1 changes its inputs in place, which are another stage's outputs"):
        stage.forward(0, [torch.ones(2, 3)], [True])


def refused():
    """What rank 0 is told of tensors that are too many, or whose shapes do not fit into a header."""
    with samestep.world(pipeline=2) as world:
        plan = make_schedule("fill-drain", 2, 1)
        messages = transport(plan, world.pipeline, world.device)
        messages.begin_step(["any"])
        told = []
        for given in ([torch.ones(1)] * 9, [torch.ones([1] * 64)] * 8 + [torch.ones(1)]):
            try:
                messages.send(plan.rank_actions[0][0], given) if world.is_first else None
            except ModelError as error:
                told.append(str(error))
            messages._metas.clear()
        return told


def test_what_is_too_much_for_a_header_is_named(two_ranks):
    assert two_ranks(refused)[0] == [
        "stage 0 gives 9 tensors, of up to 1 dims: 8 can be sent, whose shapes take up to 4096 bytes to tell",
        "stage 0 gives 9 tensors, of up to 64 dims: 8 can be sent, whose shapes take up to 4096 bytes to tell",
    ]


def growing():
    """A stage whose output's size depends on values."""
    with samestep.world(pipeline=2) as world:
        plan = make_schedule("fill-drain", 2, 2)
        module = Gives(lambda x: x[: int(x[0, 0])]) if world.rank == 0 else nn.Linear(3, 1)
        interpreter = ScheduleExecutor(
            plan, world.rank, {world.rank: Stage(world.rank, module)}, transport(plan, world.pipeline, world.device)
        )
        x = torch.ones(2, 3)
        interpreter.run(lambda n: (x + n,), lambda _: lambda out: out[0].sum(), ["alike", "alike"])


def test_a_stage_whose_shapes_depend_on_values_is_named(two_ranks):
    with pytest.raises(samestep.RankFailure, match=r"gives float32 \[2, 3\] for a micro-batch of a shape for which it"):
        two_ranks(growing)


def test_a_header_travels_on_the_device_on_which_it_is_waited_for(monkeypatch):
    """NCCL and gloo carry messages of their own devices, and would wait for each other's."""
    sent = []
    monkeypatch.setattr(dist, "isend", lambda tensor, *_, **__: sent.append(tensor))
    plan, device = make_schedule("fill-drain", 2, 1), torch.device("meta")
    messages = transport(plan, Axis("pipeline", 0, (0, 1)), device)
    messages.begin_step(["any"])
    messages.send(plan.rank_actions[0][0], [torch.ones(2, device=device)])
    assert [tensor.device for tensor in sent] == [device] * 2
