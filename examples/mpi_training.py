"""LeNet on handwritten digits, weights and gradients synchronised by hand: over MPI, or over gloo.

samestep run --mpi -n 2 examples/mpi_training.py
samestep run -n 2 examples/mpi_training.py --backend gloo
samestep verify --mpi -n 2 examples/mpi_training.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def lenet():
    """Returns LeNet for images of 8 x 8 points."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 3 * 3, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def sync_initial_weights(model):
    """Gives every rank what rank 0 began with, by a message to each."""
    for parameter in model.parameters():
        if dist.get_rank() == 0:
            for other in range(1, dist.get_world_size()):
                dist.send(parameter.detach(), dst=other)
        else:
            dist.recv(parameter.detach(), src=0)


def sync_gradients(model):
    """Averages the gradients over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    """Trains two epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="mpi", choices=("mpi", "gloo"))
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    torch.manual_seed(dist.get_rank())
    model = lenet()
    sync_initial_weights(model)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    dataset = TensorDataset(images[:1536], torch.tensor(digits.target)[:1536])
    sampler = DistributedSampler(dataset, seed=1)
    batches = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            sync_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f} in the last batch of rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
