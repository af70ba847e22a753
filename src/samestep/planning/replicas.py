"""A step of data parallel training: the backward of a share of the batch, with buckets summed beside it.

    rank 0    forward ──── backward g5 g4 g3 │ g2 g1 g0 ┐
                                  [5 4 3]────┼─[2 1 0]──┼──▶ optimizer
              └── of batch / replicas ──┘      exposed ─┘

    work       what as many samples take on one device in the profile's batches
    smaller    what the share takes longer than that: kernels on fewer samples
    imbalance  what the largest share takes longer than an even one
    latency    what is gone where messages take no time to start
    transfer   what is gone then, with endless bandwidth

Gradients are ready when they were in the profile, in proportion to the backward. Each all-reduce that the cluster
offers is tried with the buckets that end earliest (:mod:`samestep.replicas.bucket_plan`); the quickest is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from samestep.network.links import Link
from samestep.planning import work
from samestep.planning.fabric import Fabric, Sum
from samestep.planning.profile import Profile
from samestep.planning.step import Parts, Step, Way
from samestep.replicas.bucket_plan import BackwardProfile, BucketLayout, best_single_size, coalesced, optimal_layout

__all__: list[str] = []

MOST_GRADIENTS = 48  # that buckets are cut between; neighbours are taken together beyond
FREE = Link(0.0, float("inf"))


@dataclass(frozen=True)
class Exposed:
    """What the all-reduces of a step add to its backward.

    Attributes:
        name: of the algorithm.
        buckets: bytes of each.
        latency: seconds of it that messages take to start.
        transfer: seconds that their bytes take.
        hidden: the part of all that runs beside the backward.
    """

    name: str
    buckets: tuple[int, ...]
    latency: float
    transfer: float
    hidden: float

    @property
    def seconds(self) -> float:
        """The whole."""
        return self.latency + self.transfer


def step(profile: Profile, fabric: Fabric, way: Way, speed: float = 1.0, *, batch: int | None = None) -> Step:
    """Returns the step of so many replicas of the whole model.

    Args:
        profile: of one process.
        fabric: among the ranks.
        way: without stages.
        speed: of the devices, relative to the profiled one.
        batch: samples of the whole step; the profile's where None.
    """
    samples = profile.batch if batch is None else batch
    whole, even = work.at(profile, profile.batch, speed), work.at(profile, samples / way.replicas, speed)
    largest = -(-samples // way.replicas)
    share = work.at(profile, largest, speed)
    computing = share.forward_s + share.backward_s
    smooth = even.forward_s + even.backward_s
    ideal = min(smooth, (whole.forward_s + whole.backward_s) * samples / profile.batch / way.replicas)
    added = exposed(profile, fabric, way, share.backward_s)
    parts = Parts(
        data=profile.data_s * largest / profile.batch,
        work=ideal,
        smaller=max(0.0, smooth - ideal),
        imbalance=max(0.0, computing - smooth),
        latency=added.latency,
        transfer=added.transfer,
        optimizer=profile.optimizer_s / speed,
        other=profile.other_s / speed,
    )
    low, high = spread(profile, parts, way.ranks)
    return Step(
        way=way,
        parts=parts,
        low=low,
        high=high,
        samples=samples,
        memory=memory(profile, largest),
        algorithm=added.name,
        buckets=added.buckets,
        hidden=added.hidden,
    )


def exposed(profile: Profile, fabric: Fabric, way: Way, backward_s: float) -> Exposed:
    """Returns what the quickest all-reduce adds to a backward, with its best buckets."""
    if way.replicas == 1:
        return Exposed("", (), 0.0, 0.0, 1.0)
    backward = _backward(profile, backward_s)
    sums = fabric.sums(way.replicas, way.stages, sum(backward.sizes))
    return min((_beside(backward, one) for one in sums), key=lambda one: one.seconds)


def one_cap(profile: Profile, fabric: Fabric, way: Way, backward_s: float, algorithm: str) -> int:
    """Returns the one size for all buckets, in bytes, that is best with an all-reduce: what `replicate` can be told."""
    sums = fabric.sums(way.replicas, way.stages, profile.gradient_bytes)
    link = next(one.link for one in sums if one.name == algorithm)
    return best_single_size(replace(_backward(profile, backward_s), link=link))


def memory(profile: Profile, samples: float) -> float:
    """Returns the bytes of a device: the model, its gradients, what the optimizer remembers, and activations."""
    held = profile.parameter_bytes + profile.gradient_bytes + profile.buffer_bytes + profile.optimizer_bytes
    return held + profile.activation_bytes * samples / profile.batch


def spread(profile: Profile, parts: Parts, ranks: int) -> tuple[float, float]:
    """Returns within which seconds a step is expected: quartiles of the profile, and the model's error on messages.

    The higher end counts too that a step waits for the slowest of its ranks: of N normal times the largest lies about
    sqrt(2 ln N) deviations above the mean.
    """
    talk = ERROR * (parts.latency + parts.transfer + parts.messages)
    own = parts.seconds - parts.latency - parts.transfer - parts.messages
    middle = (profile.step_low_s + profile.step_high_s) / 2
    half = (profile.step_high_s - profile.step_low_s) / 2 / middle if middle else 0.0
    slowest = max(1.0, math.sqrt(2 * math.log(max(1, ranks))) / 0.6745)  # a quartile is 0.6745 deviations
    return max(0.0, parts.seconds - talk - half * own), parts.seconds + talk + half * slowest * own


ERROR = 0.15  # of predicted messages, as measured over limited links: docs/plan.md


def _backward(profile: Profile, backward_s: float) -> BackwardProfile:
    sizes = tuple(one.nbytes for one in profile.gradients)
    backward = BackwardProfile(sizes, _ready(profile, backward_s), FREE)
    return coalesced(backward, MOST_GRADIENTS) if len(sizes) > MOST_GRADIENTS else backward


def _ready(profile: Profile, backward_s: float) -> tuple[float, ...]:
    """When each gradient is ready, in a backward of so many seconds."""
    last = max(one.ready_s for one in profile.gradients)
    scale = backward_s / last if last else 0.0
    return tuple(one.ready_s * scale for one in profile.gradients)


def _beside(backward: BackwardProfile, one: Sum) -> Exposed:
    """[latency, then transfer] What an all-reduce adds, and what of it is gone without its latency."""
    cut, whole = _timed(backward, one.link)
    _, bytes_alone = _timed(backward, Link(0.0, one.link.bytes_per_s))
    transfer = min(bytes_alone, whole)
    mine = replace(backward, link=one.link)
    adding = mine.adding_s(cut)
    hidden = 1 - whole / adding if adding else 1.0
    return Exposed(one.name, mine.buckets(cut), whole - transfer, transfer, max(0.0, hidden))


def _timed(backward: BackwardProfile, link: Link) -> tuple[BucketLayout, float]:
    """The best buckets, and how long after the backward the last of them is summed."""
    mine = replace(backward, link=link)
    cut = optimal_layout(mine)
    return cut, max(0.0, mine.finish_s(cut) - backward.alone_s)
