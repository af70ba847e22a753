"""A step of pipeline parallel training: the cut with the least slowest stage, played in its schedule; then the sums.

    stage 0   F0 F1 F2 F3 ·· B0 B1 B2 B3 ├ sum ┐
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3 ├ sum ┴▶ optimizer

    imbalance   what is gone where all stages are alike            messages    what is gone where they take no time
    bubble      what remains beside the work

The search is that of `plan_pipeline`, cut short: the cut with the best bound is taken and played. What sums the stages'
gradients runs behind the step, as it does in samestep.
"""

from __future__ import annotations

from collections.abc import Sequence

from samestep.network.links import Link as Wire
from samestep.pipelines.layers import Device, Layer, Link, interpolate, with_split_backwards
from samestep.pipelines.partition import PartitionProblem
from samestep.planning.fabric import Fabric
from samestep.planning.profile import Profile
from samestep.planning.replicas import spread
from samestep.planning.step import Parts, Step, Way
from samestep.schedule.algorithms import make_schedule
from samestep.schedule.schedule import Schedule
from samestep.schedule.simulate import Costs, simulate

__all__: list[str] = []


def step(
    profile: Profile,
    fabric: Fabric,
    way: Way,
    speed: float = 1.0,
    *,
    memory: float = float("inf"),
    batch: int | None = None,
) -> Step:
    """Returns the step of replicas of stages.

    Args:
        profile: with layers.
        fabric: among the ranks.
        way: with two stages or more.
        speed: of the devices, relative to the profiled one.
        memory: bytes of each device.
        batch: samples of the whole step; the profile's where None.

    Raises:
        UsageError: no cut fits the devices' memory, or there are fewer layers than stages.
    """
    samples = profile.batch if batch is None else batch
    each = -(-samples // (way.replicas * way.micro_batches))
    plan = make_schedule(way.schedule, way.stages, way.micro_batches)
    layers = with_split_backwards(interpolate(profile.layers, each), plan)
    whole = _whole(profile, samples) / way.ranks / speed
    devices = [Device(speed, memory)] * way.stages
    problem = PartitionProblem(
        layers, devices, plan, _link(fabric.hop(way.replicas, way.stages)), state=_state(profile)
    )
    ends = problem.best(1).ends
    played = _Played(plan, problem.costs(ends))
    own = _own(layers, ends)
    summed = min(max(own), profile.gradient_bytes)  # frozen parameters have none: no stage can sum more
    tail = _tail(fabric, way, summed)
    share = max(own) / max(1.0, sum(own))
    parts = Parts(
        data=profile.data_s * (each * way.micro_batches) / profile.batch,
        work=min(whole, played.work),
        smaller=max(0.0, played.work - whole),
        imbalance=played.imbalance,
        bubble=played.bubble,
        messages=played.messages,
        latency=tail[1],
        transfer=tail[2],
        optimizer=profile.optimizer_s * share / speed,
        other=profile.other_s / speed,
    )
    low, high = spread(profile, parts, way.ranks)
    return Step(
        way=way,
        parts=parts,
        low=low,
        high=high,
        samples=samples,
        memory=_fullest(problem, ends),
        algorithm=tail[0],
        buckets=(int(summed),) if tail[0] else (),
        hidden=0.0 if tail[0] else 1.0,
        ends=ends,
    )


class _Played:
    """A schedule with the costs of a cut, and with less and less of what slows it.

    Attributes:
        work: seconds of a rank, evenly shared.
        bubble: what the schedule adds to that.
        imbalance: what unlike stages add; below 0 where the slow ones lie beside idle ranks.
        messages: what messages add.
    """

    def __init__(self, plan: Schedule, costs: Costs) -> None:
        ranks = plan.ranks
        silent = Costs(costs.forward, costs.inputs, costs.weights, overlap=costs.overlap)
        forward, inputs, weights = (sum(each) / ranks for each in (costs.forward, costs.inputs, costs.weights))
        self.work = plan.micro_batches * (forward + inputs + weights)
        alike = Costs([forward] * ranks, [inputs] * ranks, [weights] * ranks, overlap=costs.overlap)
        even = simulate(plan, alike).seconds
        quiet = simulate(plan, silent).seconds
        self.bubble = even - self.work
        self.imbalance = quiet - even
        self.messages = simulate(plan, costs).seconds - quiet


def _whole(profile: Profile, samples: int) -> float:
    """Seconds of forward and backward of so many samples in the profile's batches, layer by layer."""
    whole = sum(one.forward + one.inputs + one.weights for one in interpolate(profile.layers, profile.batch))
    return whole * samples / profile.batch


def _state(profile: Profile) -> float:
    """Copies of the parameters that are kept: themselves, gradients and what the optimizer remembers."""
    beside = profile.gradient_bytes + profile.optimizer_bytes
    return 1 + (beside / profile.parameter_bytes if profile.parameter_bytes else 1.0)


def _link(wire: Wire) -> Link:
    return Link(latency=wire.latency_s, bandwidth=wire.bytes_per_s)


def _own(layers: Sequence[Layer], ends: Sequence[int]) -> list[float]:
    """Bytes of the parameters of each stage."""
    pairs = zip((0, *ends), ends, strict=False)
    return [sum(one.parameters for one in layers[begin:end]) for begin, end in pairs]


def _tail(fabric: Fabric, way: Way, nbytes: float) -> tuple[str, float, float]:
    """Name, latency and transfer of the sum of the stage with most parameters."""
    if way.replicas == 1 or not nbytes:
        return "", 0.0, 0.0
    sums = fabric.sums(way.replicas, way.stages, nbytes)
    best = min(sums, key=lambda one: one.link.seconds(nbytes))
    return best.name, best.link.latency_s, nbytes / best.link.bytes_per_s


def _fullest(problem: PartitionProblem, ends: Sequence[int]) -> float:
    """Bytes of the stage that needs most."""
    pairs = zip((0, *ends), ends, strict=False)
    return max(float(problem.segments.memory(stage)[pair]) for stage, pair in enumerate(pairs))
