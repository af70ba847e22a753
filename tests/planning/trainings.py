"""Trainings of which everything is known, for the tests of planning."""

from __future__ import annotations

from samestep.network.cluster import parse
from samestep.network.links import Link
from samestep.pipelines.layers import Layer
from samestep.planning.fabric import ClusterFabric
from samestep.planning.profile import BatchTime, Gradient, Profile


def flat(link: Link, ranks: int) -> ClusterFabric:
    """Hosts of one device at one switch."""
    between = f"{{ latency = {link.latency_s}, bandwidth = {min(link.bytes_per_s, 1e25)} }}"
    return ClusterFabric(parse(f"nodes.count = {ranks}\nlinks.between = {between}"))


def training(
    *,
    layers: int = 4,
    batch: int = 64,
    start_s: float = 0.0,
    nbytes: int = 1_000_000,
    cut: bool = True,
    data_s: float = 0.001,
) -> Profile:
    """A chain of equal layers: of a batch each takes start_s, and 4 ms forward and 8 ms back if it is the whole."""
    sizes = tuple(BatchTime(size, *_times(layers, size / batch, start_s)) for size in (batch // 4, batch // 2, batch))
    forward, backward = sizes[-1].forward_s, sizes[-1].backward_s
    gradients = [Gradient(f"{n}.weight", nbytes, backward * (layers - n) / layers) for n in reversed(range(layers))]
    return Profile(
        script="train.py",
        machine="imagined",
        torch="2.13.0",
        batch=batch,
        steps=10,
        data_s=data_s,
        forward_s=forward,
        backward_s=backward,
        optimizer_s=0.002,
        other_s=0.0005,
        step_low_s=0.99 * (forward + backward),
        step_high_s=1.01 * (forward + backward),
        gradients=tuple(gradients),
        parameter_bytes=layers * nbytes,
        buffer_bytes=0,
        optimizer_bytes=2 * layers * nbytes,
        activation_bytes=layers * 4_000_000,
        sizes=sizes,
        layers={one.samples: _layers(layers, one.samples / batch, start_s, nbytes) for one in sizes} if cut else {},
        uncut=None if cut else "its forward cannot be followed",
    )


def _times(layers: int, part: float, start_s: float) -> tuple[float, float]:
    return layers * (start_s + 0.004 * part), layers * (start_s + 0.008 * part)


def _layers(layers: int, part: float, start_s: float, nbytes: int) -> tuple[Layer, ...]:
    each = start_s + 0.004 * part
    half = start_s / 2 + 0.004 * part
    return tuple(
        Layer(str(n), each, half, half, activations=1e6 * part, saved=4e6 * part, parameters=nbytes)
        for n in range(layers)
    )
