"""Trainings that others have measured and published, as profiles: what is known of them, and where from."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.network.cluster import parse
from samestep.planning.profile import Gradient, Profile

# Horovod's README: 128 servers with 4 Pascal GPUs each, 25 Gbit/s RoCE, 512 GPUs, synthetic data, weak scaling.
# What is inside a server is not said: 10 GB/s, as PCIe 3.0 gives.
HOROVOD = parse(
    "[nodes]\ncount = 128\ndevices = 4\n[links]\n"
    'inside = { latency = "10 us", bandwidth = "10 GB/s" }\nbetween = { latency = "10 us", bandwidth = "25 Gbit/s" }'
)
BATCH = 64  # of each GPU, as in TensorFlow's benchmarks
RATES = {"Inception V3": 142.0, "VGG-16": 154.0}  # images a second of one P100: tensorflow.org/performance/benchmarks
# VGG-16 (arXiv:1409.1556): inputs, outputs and the side of the image of each convolution; then the linear layers
CONVOLUTIONS = (
    [(3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56)]
    + 2 * [(256, 256, 56)]
    + [(256, 512, 28)]
    + 2 * [(512, 512, 28)]
    + 3 * [(512, 512, 14)]
)
LINEAR = ((25088, 4096), (4096, 4096), (4096, 1000))
INCEPTION = 23_834_568  # parameters, without the auxiliary head

# The README of PyTorch's benchmarks/distributed/ddp: 8 V100 a machine, 4 x 100 Gb InfiniBand, batches of 32 a GPU, and
# the median step of one process with DistributedDataParallel. Six NVLinks of 25 GB/s leave each GPU (topology there).
DGX = parse(
    "[nodes]\ncount = 4\ndevices = 8\n[links]\nnics = 4\n"
    'inside = { latency = "10 us", bandwidth = "150 GB/s" }\nbetween = { latency = "10 us", bandwidth = "100 Gbit/s" }'
)
# The cluster of the paper on DistributedDataParallel (arXiv:2006.15704): 4 such machines with one 100 Gb card each.
ONE_CARD = parse(
    "[nodes]\ncount = 4\ndevices = 8\n[links]\n"
    'inside = { latency = "10 us", bandwidth = "150 GB/s" }\nbetween = { latency = "10 us", bandwidth = "100 Gbit/s" }'
)
RESNETS = {  # parameters, how many tensors they are in (torchvision's), seconds of a step with DDP on one GPU
    "ResNet-50": (25_557_032, 161, 0.100),
    "ResNet-101": (44_549_160, 314, 0.171),
    "ResNeXt-50": (25_028_904, 161, 0.147),
    "ResNeXt-101": (88_791_336, 314, 0.425),
}


def vgg16() -> Profile:
    """Gradients are ready as the operations of the layers above them are done."""
    layers = [(9 * a * b + b, 9 * a * b * side * side) for a, b, side in CONVOLUTIONS]
    layers += [(a * b + b, a * b) for a, b in LINEAR]
    return _profile("VGG-16", layers, BATCH / RATES["VGG-16"])


def inception() -> Profile:
    """What its layers take is left out: parameters become ready evenly over the backward."""
    return _profile("Inception V3", [(INCEPTION // 48, 1)] * 48, BATCH / RATES["Inception V3"])


def resnet(name: str) -> Profile:
    """Parameters become ready evenly over the backward, as far as is known."""
    parameters, tensors, seconds = RESNETS[name]
    return _profile(name, [(parameters // tensors, 1)] * tensors, seconds, batch=32, machine="V100")


def _profile(
    name: str, layers: Sequence[tuple[int, int]], seconds: float, *, batch: int = BATCH, machine: str = "P100"
) -> Profile:
    backward, work = seconds * 2 / 3, sum(each for _, each in layers)
    gradients, done = [], 0
    for number, (parameters, each) in reversed(list(enumerate(layers))):
        done += each
        gradients.append(Gradient(str(number), 4 * parameters, backward * done / work))
    return Profile(
        script=name,
        machine=machine,
        torch="-",
        batch=batch,
        steps=1,
        data_s=0.0,
        forward_s=seconds - backward,
        backward_s=backward,
        optimizer_s=0.0,
        other_s=0.0,
        step_low_s=seconds,
        step_high_s=seconds,
        gradients=tuple(gradients),
        parameter_bytes=4 * sum(each for each, _ in layers),
        buffer_bytes=0,
        optimizer_bytes=0,
        activation_bytes=0,
    )
