"""Gradients in eight bits: by hand in twenty lines, and replicate(compress="int8") beside it.

    gradient   0.031 -0.127 0.064 …      a float32 each
    sent         31   -127    64  …      a byte each, and one scale: the largest ÷ 127
    lost       at most half a scale for each number, in every step

samestep run -n 2 examples/quantised_gradients.py

By hand every rank sends its bytes to all others, who decode and average; what is rounded away is gone.
`compress="int8"` has a scale for each 512 numbers, rounds without bias, adds what was lost to the next gradient (error
feedback), and sends each rank a share to add up, so the bytes do not grow with the ranks. Small tensors travel as they
are. It pays between hosts on slow links; within one host nothing does: `samestep bench compress`.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def average_in_bytes(gradient):
    """Replaces a gradient by the mean of all ranks' rounded ones; returns the bytes that this rank has sent."""
    size = dist.get_world_size()
    scale = (gradient.abs().max() / 127).clamp_min(1e-30).reshape(1)
    rounded = (gradient / scale).round().to(torch.int8)
    scales = [torch.empty_like(scale) for _ in range(size)]
    pieces = [torch.empty_like(rounded) for _ in range(size)]
    dist.all_gather(scales, scale)
    dist.all_gather(pieces, rounded)
    gradient.copy_(sum(piece * unit for piece, unit in zip(pieces, scales, strict=True)) / size)
    return (size - 1) * (rounded.nbytes + scale.nbytes)


def train(world, dataset, compress=None, *, by_hand=False):
    """Trains five epochs; returns the last loss, and the bytes that a rank has sent for gradients."""
    torch.manual_seed(0)
    network, sent = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), 0
    ring = 2 * (world.size - 1) / world.size  # of all gradients, what a rank sends in a ring
    model = network if by_hand else samestep.replicate(network, world, compress=compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = samestep.shards(dataset, world, batch_size=64, shuffle=False)
    for _ in range(5):
        for x, y in batches:
            optimizer.zero_grad()
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            for parameter in network.parameters():
                sent += average_in_bytes(parameter.grad) if by_hand else int(ring * parameter.grad.nbytes)
            optimizer.step()
    return batches.loss, model.compression.sent if compress else sent


def main():
    """Trains in float32, in bytes by hand, and with samestep's codec."""
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.data).float() / 16, torch.tensor(data.target))
    with samestep.world() as world:
        runs = {
            "float32": train(world, dataset),
            "int8 by hand": train(world, dataset, by_hand=True),
            'compress="int8"': train(world, dataset, "int8"),
        }
        if world.is_first:
            for name, (loss, sent) in runs.items():
                print(f"{name:16} loss {loss:.4f}, {sent:9,} bytes from each rank")


if __name__ == "__main__":
    main()
