"""Data parallelism with nothing but broadcast and all_reduce, and the proof that it is the training of one process.

    rank 0   weights ──┬─▶ forward, backward on its half ──┐                       ┌─▶ step
                       │ 1                                 ├─▶ all_reduce, ÷ 2  2 ─┤
    rank 1   weights ◀─┘   forward, backward on its half ──┘                       └─▶ step

samestep run -n 2 examples/weights_and_gradients_by_hand.py
samestep run -n 4 examples/weights_and_gradients_by_hand.py

1  Initial weights: rank 0's, broadcast; the ranks have seeded their generators differently on purpose.
2  Gradients: the mean over the ranks. It is the gradient of the whole batch only because all parts are equally large
   and the loss is their mean; uneven_data.py shows what is to be done where they are not.

Rank 0 then trains alone on whole batches, from the same weights, and prints how far the results are apart.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import samestep

BATCH, EPOCHS = 64, 2


def network():
    """Returns a network in float64, so that what is left of a difference is rounding."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def share_weights(model):
    """Gives every rank rank 0's weights [1]."""
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model, size):
    """Replaces every gradient by the mean over the ranks [2]."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size


def train(model, x, y, rank, size):
    """Trains on every rank's own part of each batch; a size of 1 is one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    part = BATCH // size
    for _ in range(EPOCHS):
        for start in range(rank * part, len(x), BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[start : start + part]), y[start : start + part]).backward()
            if size > 1:
                average_gradients(model, size)
            optimizer.step()


def main():
    """Trains on all ranks, then on rank 0 alone."""
    data = load_digits()
    x, y = torch.tensor(data.data[:1536]) / 16, torch.tensor(data.target[:1536])
    with samestep.world(seed=None) as world:
        torch.manual_seed(world.rank)
        model, alone = network(), network()
        share_weights(model)
        alone.load_state_dict(model.state_dict())
        train(model, x, y, world.rank, world.size)
        if world.is_first:
            train(alone, x, y, 0, 1)
            apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
            print(f"{world.size} ranks and one process: weights at most {apart:.1e} apart after {EPOCHS} epochs")


if __name__ == "__main__":
    main()
