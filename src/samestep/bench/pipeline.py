"""A pipeline's step beside what was predicted of it, and beside torch's own schedule of the same stages.

    stages that wait     of known cost, measured as a plan's: how near a step comes to what its schedule allows
    blocks of layers     cut by plan_pipeline, then measured and taken in turn: how true a prediction is
    the same blocks      ours and torch.distributed.pipelining's 1F1B in alternating pairs, in the same processes

A prediction holds for the step without its tail, which is the loss told to all; what is timed has the tail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import samestep
from samestep.bench.harness import Comparison, Options, Report, alternate, interleave, training_device
from samestep.bench.step import align
from samestep.errors import UsageError
from samestep.launch.functions.spawn import spawn
from samestep.pipelines.layers import Device, Link, with_split_backwards
from samestep.pipelines.links import measure_link
from samestep.pipelines.model_chain import build_chain
from samestep.pipelines.partition import PartitionProblem
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.plan import PipelinePlan
from samestep.pipelines.profiler import REPEATS, profile_layers
from samestep.rankenv import variable
from samestep.runtime.exchange import broadcast_json
from samestep.runtime.world import World
from samestep.schedule.algorithms import make_schedule
from samestep.schedule.simulate import Costs, simulate
from samestep.topology import cut_evenly

MOST = {"waits": 1.05, "blocks": 1.15}  # of what was predicted
NEAR = 0.95  # of what a split allows at best, on stages of known cost
SCHEDULES = ("fill-drain", "1f1b", "eager-1f1b", "zero-bubble")
MICRO_BATCHES = 8
FORWARD_S, BACKWARD_S = 0.010, 0.020  # of a stage that waits
SAMPLES, WIDTH, BLOCKS = 128, 512, 8
PASSES = 5  # of which the median is one time, of a step or a layer
Times = tuple[list[float], list[float]]


def run(options: Options) -> Report:
    if options.ranks < 2:
        raise UsageError("a pipeline has two stages at least: samestep bench pipeline -n 2")
    if options.ranks > BLOCKS:
        raise UsageError(f"{BLOCKS} blocks make no {options.ranks} stages: samestep bench pipeline -n {BLOCKS} at most")
    device = training_device(options.ranks)
    comparisons, conditions = spawn(compare, options.ranks, options.repeats, device, progress=False)[0]
    return Report("pipeline", comparisons, conditions)


def compare(repeats: int, device: str | None) -> tuple[list[Comparison], dict[str, Any]]:
    """Runs on every rank; returns the comparisons and the conditions. Collective."""
    with samestep.world(device=device, pipeline=int(variable("WORLD_SIZE") or 1)) as world:
        link = measure_link(world)
        found = []
        for schedule in SCHEDULES:
            times, figures = waiting(world, schedule, link, repeats)
            found.append(Comparison(f"waits, {schedule} / predicted", "step", *times, MOST["waits"], figures))
        if world.pipeline.size == 2:
            times, figures = rebalanced(world, repeats)
            found.append(Comparison("waits, as much on both stages / 4 to 3", "step", *times, None, figures))
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(SAMPLES, WIDTH, generator=generator).to(world.device) for _ in range(2))
        model = blocks().to(world.device)
        plan = samestep.plan_pipeline(model, (x, y), functional.mse_loss, stages=world.pipeline.size, link=link)
        times = in_pairs(world, model, plan, (x, y), repeats)
        figures = {"stages": float(len(plan.ends)), "micro_batches": float(plan.micro_batches)}
        found.append(Comparison("blocks, as planned / predicted", "step", *times, MOST["blocks"], figures))
        found.append(Comparison("1f1b / torch's 1F1B", "step", *beside_torch(world, (x, y), repeats)))
        message = link.latency + 2 * link.overhead
        return found, setting(world) | {"message_ms": f"{1e3 * message:.2f}"}


def waiting(world: World, schedule: str, link: Link, repeats: int) -> tuple[Times, dict[str, float]]:
    """Returns times of steps of stages that wait, what is predicted of them, and how near they come to the ideal.

    The ideal is the schedule of the stages as measured, with messages that take no time. Collective.
    """
    stages = world.pipeline.size
    ends = range(1, stages + 1)
    loss = functional.mse_loss
    stage = Pipeline(waits(stages), world, loss, ends=ends, schedule=schedule, micro_batches=MICRO_BATCHES)
    x, y = torch.ones(MICRO_BATCHES, 4), torch.zeros(MICRO_BATCHES, 4)
    layers = build_chain(waits(stages)).layers
    measured = profile_layers(layers, [x[:1]], lambda outputs: loss(outputs, y[:1]), REPEATS)
    plan = make_schedule(schedule, stages, MICRO_BATCHES)
    costs = PartitionProblem(with_split_backwards(measured, plan), [Device()] * stages, plan, link).costs(ends)
    silent = Costs(costs.forward, costs.inputs, costs.weights)
    predicted, ideal = broadcast_json(world.everyone, [simulate(plan, one).seconds for one in (costs, silent)])
    (ours,) = alternate(stepper(stage, (x, y)), pairs=repeats, align=lambda: align(world))
    times = ours, [predicted] * len(ours)
    return times, {"of_ideal": ideal / median(times[0]), "target_at_least": NEAR}


def rebalanced(world: World, repeats: int) -> tuple[Times, dict[str, float]]:
    """Returns times of steps of two stages with as much work, and with 4 to 3 of the same work, and their ratio.

    Six micro-batches keep the ranks busy for 92 and 69 % of the step then, and for 86 % both when they share evenly: it
    is predicted to be 6 % shorter. Collective.
    """

    def step_of(factors: tuple[float, float]) -> Callable[[], None]:
        stage = Pipeline(waits(2, factors), world, functional.mse_loss, ends=(1, 2), schedule="1f1b", micro_batches=6)
        return stepper(stage, (torch.ones(6, 4), torch.zeros(6, 4)))

    def predicted(factors: tuple[float, float]) -> float:
        forward, half = ([factor * seconds for factor in factors] for seconds in (FORWARD_S, BACKWARD_S / 2))
        return simulate(make_schedule("1f1b", 2, 6), Costs(forward, half, half)).seconds

    even, uneven = (7 / 8, 7 / 8), (1.0, 3 / 4)
    ours, theirs = alternate(step_of(even), step_of(uneven), pairs=repeats, align=lambda: align(world))
    return (ours, theirs), {"predicted_ratio": predicted(even) / predicted(uneven)}


def in_pairs(world: World, model: nn.Module, plan: PipelinePlan, batch: tuple[Tensor, Tensor], pairs: int) -> Times:
    """Returns times of steps, and what layers that were measured just before or after say of each. Collective.

    A machine that computes half as quick for a second moves both; beside a prediction of a minute ago it would be an
    error of the model.
    """
    step = stepper(samestep.pipeline(model, world, plan), batch)
    size = SAMPLES // plan.micro_batches
    x, y = (each[:size] for each in batch)
    layers = build_chain(model, [x]).layers

    def predicted() -> float:
        align(world)
        found = profile_layers(layers, [x], lambda outputs: functional.mse_loss(outputs, y), PASSES)
        seconds = replace(plan, sizes={size: found}).seconds_of(SAMPLES, plan.micro_batches)
        return float(broadcast_json(world.everyone, seconds))

    def taken() -> float:
        return median(alternate(step, pairs=PASSES, warmup=1, align=lambda: align(world))[0])

    ours, theirs = interleave(taken, predicted, pairs=pairs, warmup=1)
    return ours, theirs


def beside_torch(world: World, batch: tuple[Tensor, Tensor], repeats: int) -> Times:
    """Returns times of our 1F1B and of torch's, of the same stages and micro-batches. Collective."""
    axis = world.pipeline
    cuts = cut_evenly(BLOCKS, axis.size)
    each = len(list(blocks()[0].children()))
    ends, model = [each * end for _, end in cuts], blocks().to(world.device)
    ours = Pipeline(model, world, functional.mse_loss, ends=ends, schedule="1f1b", micro_batches=MICRO_BATCHES)
    part = blocks().to(world.device)[slice(*cuts[axis.rank])]
    stage = PipelineStage(part, axis.rank, axis.size, world.device, group=axis.group)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=functional.mse_loss)
    x, y = batch

    def theirs() -> None:
        part.zero_grad()
        if axis.rank == 0:
            schedule.step(x)
        elif axis.rank == axis.size - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()

    mine, others = alternate(stepper(ours, batch), theirs, pairs=repeats, align=lambda: align(world))
    return mine, others


def stepper(stage: Any, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    def step() -> None:
        stage.zero_grad()
        stage.step(batch)

    return step


def blocks() -> nn.Sequential:
    """Returns blocks of layers, the same on every rank."""
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    return nn.Sequential(*(block() for _ in range(BLOCKS)))


def waits(stages: int, factors: Sequence[float] = ()) -> nn.Sequential:
    """Returns layers that take their time, by factors if given, and no core: both halves of a backward apart."""

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
            ctx.seconds = backward_s
            threading.Event().wait(forward_s)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
            threading.Event().wait(ctx.seconds)
            return gradients[0], None, None

    class Waits(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.forward_s, self.backward_s = factor * FORWARD_S, factor * BACKWARD_S / 2

        def forward(self, x: Tensor) -> Tensor:
            weight = Passes.apply(self.weight, 0.0, self.backward_s)  # type: ignore[no-untyped-call]
            inputs = x if x.requires_grad else x.clone().requires_grad_()
            found: Tensor = Passes.apply(inputs, self.forward_s, self.backward_s) * weight  # type: ignore[no-untyped-call]
            return found

    return nn.Sequential(*(Waits(factor) for factor in (factors or [1.0] * stages)))


def setting(world: World) -> dict[str, Any]:
    return {
        "ranks": world.size,
        "device": str(world.device),
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(each.numel() for each in blocks().parameters()),
        "batch_size": SAMPLES,
        "waits_ms": f"{1e3 * FORWARD_S:g} and {1e3 * BACKWARD_S:g}",
        "micro_batches": MICRO_BATCHES,
    }
