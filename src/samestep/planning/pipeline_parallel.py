"""A step of pipeline parallel training: the cut with the least slowest stage, played in its schedule; then the sums.

    stage 0   F0 F1 F2 F3 ·· B0 B1 B2 B3 ├ sum ┐
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3 ├ sum ┴▶ optimizer

    imbalance   what is gone where all stages are alike            messages    what is gone where they take no time
    bubble      what remains beside the work

The search is that of `plan_pipeline`, cut short: the cut with the best bound is taken and played. What sums the stages'
gradients runs behind the step, as it does in samestep.
"""

from __future__ import annotations

from samestep.network.links import Link as NetworkLink
from samestep.pipelines.layers import Device, Link, interpolate, with_split_backwards
from samestep.pipelines.partition import PartitionProblem
from samestep.planning.fabric import ClusterFabric
from samestep.planning.profile import Profile
from samestep.planning.step import ParallelLayout, PredictedStep, StepBreakdown, predicted
from samestep.schedule.algorithms import make_schedule
from samestep.schedule.schedule import Schedule
from samestep.schedule.simulate import Costs, simulate


def predict(
    profile: Profile,
    fabric: ClusterFabric,
    layout: ParallelLayout,
    speed: float = 1.0,
    *,
    memory: float = float("inf"),
    batch: int | None = None,
) -> PredictedStep:
    """Returns the step of replicas of stages; the arguments are those of `data_parallel.predict`.

    Raises:
        UsageError: no cut fits the devices' memory, or there are fewer layers than stages.
    """
    samples = profile.batch if batch is None else batch
    each = -(-samples // (layout.replicas * layout.micro_batches))
    schedule = make_schedule(layout.schedule, layout.stages, layout.micro_batches)
    layers = with_split_backwards(interpolate(profile.layers, each), schedule)
    devices = [Device(speed, memory)] * layout.stages
    link = link_of(fabric.stage_link(layout.replicas, layout.stages))
    beside = profile.gradient_bytes + profile.optimizer_bytes
    state = 1 + (beside / profile.parameter_bytes if profile.parameter_bytes else 1.0)  # copies of the parameters
    problem = PartitionProblem(layers, devices, schedule, link, state=state)
    ends = problem.best(1).ends
    cuts = list(zip((0, *ends), ends, strict=False))
    own = [sum(one.parameters for one in layers[begin:end]) for begin, end in cuts]
    summed = min(max(own), profile.gradient_bytes)  # frozen parameters have none: no stage can sum more
    share = max(own) / max(1.0, sum(own))
    work, bubble, imbalance, messages = _simulated(schedule, problem.costs(ends))
    algorithm, latency, transfer = _all_reduce(fabric, layout, summed)
    whole = sum(one.forward + one.inputs + one.weights for one in interpolate(profile.layers, profile.batch))
    ideal = min(whole * samples / profile.batch / layout.ranks / speed, work)
    parts = StepBreakdown(
        data=profile.data_s * (each * layout.micro_batches) / profile.batch,
        work=ideal,
        smaller=work - ideal,
        imbalance=imbalance,
        bubble=bubble,
        messages=messages,
        latency=latency,
        transfer=transfer,
        optimizer=profile.optimizer_s * share / speed,
        other=profile.other_s / speed,
    )
    most = max(float(problem.segments.memory(stage)[cut]) for stage, cut in enumerate(cuts))
    all_reduce = {"algorithm": algorithm, "buckets": (int(summed),), "hidden": 0.0} if algorithm else {}
    return predicted(profile, layout, parts, samples, most, ends=ends, **all_reduce)


def _simulated(schedule: Schedule, costs: Costs) -> tuple[float, float, float, float]:
    """A schedule with the costs of a cut, and with less and less of what slows it.

    Returns seconds of a rank's work, evenly shared; what the schedule adds to that; what unlike stages add, below 0
    where the slow ones are next to idle ranks; and what messages add.
    """
    ranks = schedule.ranks
    forward, inputs, weights = (sum(each) / ranks for each in (costs.forward, costs.inputs, costs.weights))
    work = schedule.micro_batches * (forward + inputs + weights)
    equal = Costs([forward] * ranks, [inputs] * ranks, [weights] * ranks, overlap=costs.overlap)
    even = simulate(schedule, equal).seconds
    silent = simulate(schedule, Costs(costs.forward, costs.inputs, costs.weights, overlap=costs.overlap)).seconds
    return work, even - work, silent - even, simulate(schedule, costs).seconds - silent


def link_of(link: NetworkLink) -> Link:
    return Link(latency=link.latency_s, bandwidth=link.bytes_per_s)


def _all_reduce(fabric: ClusterFabric, layout: ParallelLayout, nbytes: float) -> tuple[str, float, float]:
    """Name, latency and transfer of the all-reduce of the stage with most parameters."""
    if layout.replicas == 1 or not nbytes:
        return "", 0.0, 0.0
    options = fabric.all_reduces(layout.replicas, layout.stages, nbytes)
    best = min(options, key=lambda one: one.link.seconds(nbytes))
    return best.name, best.link.latency_s, nbytes / best.link.bytes_per_s
