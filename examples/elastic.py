"""A rank dies, and the training goes on by itself, to the very weights of a run in which nobody died.

    attempt 0   1 2 3 … 20  saved  21 22 … 27   rank 1 ends without a word
    attempt 1                 └──▶ 21 22 … 27 28 … 58      on as many ranks, or on fewer

samestep run -n 2 --restarts 1 examples/elastic.py --fail-at 27
torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/elastic.py --fail-at 27
samestep run -n 4 examples/elastic.py                  # nobody dies, twice as many ranks
python examples/elastic.py                             # nobody dies, one process

All print the same fingerprint (in a new folder each: what a run keeps in elastic/, the next one goes on from). Both
launchers start all ranks again and count the attempts in TORCHELASTIC_RESTART_COUNT; `samestep.checkpoint` finds the
newest step that was saved whole. On several hosts `--lost-host continue` goes on with those that are left, `wait` waits
for another. `virtual_ranks=4` cuts each step into four slices on any number of ranks, so that sums have the same bits.
"""

import argparse
import hashlib
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def train(world, fail_at):
    """Trains two epochs of 29 steps; returns the step that it began with, and the weights."""
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)).to(world.device)
    model = samestep.replicate(network, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.data).float() / 16, torch.tensor(data.target))
    batches = samestep.shards(dataset, world, batch_size=62)
    state = samestep.checkpoint("elastic", world, every=20, model=model, optimizer=optimizer, data=batches)
    began, first = state.step, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for _ in state.epochs(2):
        for x, y in batches:
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
                if first and state.step == fail_at and world.rank == 1:
                    os._exit(9)  # as if the kernel had ended it
    return began, list(network.parameters())


def main():
    """Trains, and prints what the weights come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fail-at", type=int, help="the step after which rank 1 ends, in the first attempt")
    with samestep.world(virtual_ranks=4) as world:
        began, weights = train(world, parser.parse_args().fail_at)
        if world.is_first:
            numbers = b"".join(weight.detach().cpu().numpy().tobytes() for weight in weights)
            print(f"world of {world.size}, from step {began}: weights {hashlib.sha256(numbers).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
