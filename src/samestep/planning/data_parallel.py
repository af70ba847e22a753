"""A step of data parallel training: the backward of a share of the batch, with buckets summed beside it.

    rank 0    forward ──── backward g5 g4 g3 │ g2 g1 g0 ┐
                                  [5 4 3]────┼─[2 1 0]──┼──▶ optimizer
              └── of batch / replicas ──┘      exposed ─┘

    work       what as many samples take on one device in the profile's batches
    smaller    what the share takes longer than that: kernels on fewer samples
    imbalance  what the largest share takes longer than an even one
    latency    what is gone where messages take no time to start
    transfer   what is gone then, with infinite bandwidth

Gradients are ready when they were in the profile, in proportion to the backward. Each all-reduce of the cluster is
tried with the buckets that end earliest (:mod:`samestep.replicas.bucket_plan`); the fastest is taken.

What one device takes for any number of samples is read between the batches that were measured:

    seconds
       │            ●     measured
       │       ○         asked for: on the line between its neighbours
       │   ●              below the smallest: its slope between the first two, never below 0
       └───────────── samples

Kernels need a while however few the samples are, so half a batch takes more than half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from samestep.network.links import Link
from samestep.planning.fabric import AllReduceOption, ClusterFabric
from samestep.planning.profile import BatchTime, Profile
from samestep.planning.step import ParallelLayout, PredictedStep, StepBreakdown, predicted
from samestep.replicas.bucket_plan import BackwardProfile, BucketLayout, best_single_size, coalesced, optimal_layout

MOST_GRADIENTS = 48  # that buckets are cut between; neighbours are taken together beyond
FREE = Link(0.0, float("inf"))


@dataclass(frozen=True)
class Communication:
    """What the all-reduces of a step add to its backward."""

    name: str  # of the algorithm
    buckets: tuple[int, ...]  # bytes of each
    latency: float  # seconds of it that messages take to start
    transfer: float  # seconds that their bytes take
    overlap: float  # the part of all that runs beside the backward

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


def predict(
    profile: Profile, fabric: ClusterFabric, layout: ParallelLayout, speed: float = 1.0, *, batch: int | None = None
) -> PredictedStep:
    """Returns the step of so many replicas of the whole model, on devices `speed` times as fast as the profiled one.

    `batch` are the samples of the whole step, the profile's where None.
    """
    samples = profile.batch if batch is None else batch
    whole = compute_time(profile, profile.batch, speed)
    even = compute_time(profile, samples / layout.replicas, speed)
    largest = -(-samples // layout.replicas)
    share = compute_time(profile, largest, speed)
    ideal = min(even.seconds, whole.seconds * samples / profile.batch / layout.replicas)
    added = exposed_communication(profile, fabric, layout, share.backward_s)
    parts = StepBreakdown(
        data=profile.data_s * largest / profile.batch,
        work=ideal,
        smaller=max(0.0, even.seconds - ideal),
        imbalance=max(0.0, share.seconds - even.seconds),
        latency=added.latency,
        transfer=added.transfer,
        optimizer=profile.optimizer_s / speed,
        other=profile.other_s / speed,
    )
    all_reduce = {"algorithm": added.name, "buckets": added.buckets, "hidden": added.overlap}
    return predicted(profile, layout, parts, samples, memory(profile, largest), **all_reduce)


def compute_time(profile: Profile, samples: float, speed: float = 1.0) -> BatchTime:
    """Returns forward and backward of `samples`, 0 or more, on a device `speed` times as fast as the profiled one.

    Of a profile without other batches the step itself serves, in proportion.

    >>> sizes = (BatchTime(8, 2.0, 4.0), BatchTime(16, 3.0, 6.0))
    >>> _between(sizes, 12), _between(sizes, 4), _between(sizes, 32)
    ((2.5, 5.0), (1.5, 3.0), (5.0, 10.0))
    """
    if samples <= 0:
        return BatchTime(0, 0.0, 0.0)
    share = samples / profile.batch
    known = _between(sorted(profile.sizes, key=lambda one: one.samples), samples)
    forward, backward = known or (profile.forward_s * share, profile.backward_s * share)
    return BatchTime(round(samples), forward / speed, backward / speed)


def exposed_communication(
    profile: Profile, fabric: ClusterFabric, layout: ParallelLayout, backward_s: float
) -> Communication:
    """Returns what the fastest all-reduce adds to a backward, with its best buckets."""
    if layout.replicas == 1:
        return Communication("", (), 0.0, 0.0, 1.0)
    backward = _backward(profile, backward_s)
    options = fabric.all_reduces(layout.replicas, layout.stages, sum(backward.sizes))
    return min((_overlapped(backward, one) for one in options), key=lambda one: one.seconds)


def best_cap(profile: Profile, fabric: ClusterFabric, layout: ParallelLayout, backward_s: float, algorithm: str) -> int:
    """Returns the one size for all buckets, in bytes, that is best with an all-reduce: what `replicate` can be told."""
    options = fabric.all_reduces(layout.replicas, layout.stages, profile.gradient_bytes)
    link = next(one.link for one in options if one.name == algorithm)
    return best_single_size(replace(_backward(profile, backward_s), link=link))


def memory(profile: Profile, samples: float) -> float:
    """Returns the bytes of a device: the model, its gradients, the optimizer's state, and activations."""
    held = profile.parameter_bytes + profile.gradient_bytes + profile.buffer_bytes + profile.optimizer_bytes
    return held + profile.activation_bytes * samples / profile.batch


def _between(sizes: Sequence[BatchTime], samples: float) -> tuple[float, float] | None:
    """Forward and backward on the line through the two nearest sizes; None with fewer than two."""
    if len(sizes) < 2:
        return None
    below = max((n for n, one in enumerate(sizes[:-1]) if one.samples <= samples), default=0)
    one, other = sizes[below], sizes[below + 1]
    share = (samples - one.samples) / (other.samples - one.samples)
    forward = one.forward_s + share * (other.forward_s - one.forward_s)
    backward = one.backward_s + share * (other.backward_s - one.backward_s)
    return max(0.0, forward), max(0.0, backward)


def _backward(profile: Profile, backward_s: float) -> BackwardProfile:
    """When each gradient is ready, in a backward of so many seconds; neighbours taken together where they are many."""
    last = max(one.ready_s for one in profile.gradients)
    scale = backward_s / last if last else 0.0
    sizes = tuple(one.nbytes for one in profile.gradients)
    backward = BackwardProfile(sizes, tuple(one.ready_s * scale for one in profile.gradients), FREE)
    return coalesced(backward, MOST_GRADIENTS) if len(sizes) > MOST_GRADIENTS else backward


def _overlapped(backward: BackwardProfile, option: AllReduceOption) -> Communication:
    """[latency, then transfer] What an all-reduce adds, and what of it is gone without its latency."""
    layout, exposed = _timed(backward, option.link)
    _, without_latency = _timed(backward, Link(0.0, option.link.bytes_per_s))
    transfer = min(without_latency, exposed)
    own = replace(backward, link=option.link)
    total = own.adding_s(layout)
    overlap = 1 - exposed / total if total else 1.0
    return Communication(option.name, own.buckets(layout), exposed - transfer, transfer, max(0.0, overlap))


def _timed(backward: BackwardProfile, link: Link) -> tuple[BucketLayout, float]:
    """The best buckets, and how long after the backward the last of them is summed."""
    own = replace(backward, link=link)
    layout = optimal_layout(own)
    return layout, max(0.0, own.finish_s(layout) - backward.alone_s)
