"""Checkpoint, stop in mid-epoch, and go on with another number of ranks.

    1 process   1 2 3 … 40  saved  41 42 43  stopped     three steps are lost
    2 ranks                   └──▶ 41 42 43 44 … 58      and taken again, with the same samples
    1 process   1 2 3 … 58                               never stopped: the same weights

python examples/resume.py

Each line is a run of its own; on a command line they would be `python train.py` and, after whatever ended it,
`samestep run -n 2 train.py`, or the other way round. With `virtual_ranks=4` a step is cut into four slices whatever the
number of ranks, and the resumed run has the very bits of the one that never stopped.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def train(folder, stop_after, virtual_ranks):
    """Trains two epochs of 29 steps, from the newest checkpoint; returns what it began with and the weights."""
    with samestep.world(virtual_ranks=virtual_ranks) as world:
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
        model = samestep.replicate(network, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = load_digits()
        dataset = TensorDataset(torch.tensor(data.data) / 16, torch.tensor(data.target))
        batches = samestep.shards(dataset, world, batch_size=62)
        state = samestep.checkpoint(folder, world, every=20, model=model, optimizer=optimizer, data=batches)
        began = state.step
        for _ in state.epochs(2):
            for x, y in batches:
                batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
                if batches.step_ends:  # with virtual ranks a process takes several slices, one after another
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
                if state.step == stop_after:
                    return began, state.step, []
        return began, state.step, [parameter.detach() for parameter in network.parameters()]


def compare(virtual_ranks):
    """Trains in two runs and in one."""
    print(f"virtual_ranks={virtual_ranks}")
    with tempfile.TemporaryDirectory() as stopped, tempfile.TemporaryDirectory() as whole:
        runs = [(1, stopped, 43), (2, stopped, None), (1, whole, None)]
        weights = []
        for ranks, folder, stop_after in runs:
            if ranks == 1:  # here: a world of one
                began, ended, last = train(folder, stop_after, virtual_ranks)
            else:
                began, ended, last = samestep.spawn(train, ranks, folder, stop_after, virtual_ranks)[0]
            print(f"  on {ranks}: began with the weights of step {began}, ended at step {ended}")
            weights.append(last)
    pairs = list(zip(weights[1], weights[2], strict=True))
    apart = max((a - b).abs().max().item() for a, b in pairs)
    print(f"  weights at most {apart:.1e} apart, same bits: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    compare(None)
    compare(4)
