"""A process for each GPU, or any number on CPUs."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
training, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main(world):
    """Trains two epochs, and prints the loss on held-out digits."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    model = samestep.replicate(model.to(world.device), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = samestep.shards(training, world, batch_size=64)
    for _ in range(2):
        for x, y in batches:
            loss = batches.mean(F.cross_entropy(model(x), y, reduction="none"))
            loss.backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
    scores = samestep.evaluate(
        lambda batch: (model(batch[0]), batch[1]), held_out, world, batch_size=256, metrics={"loss": F.cross_entropy}
    )
    if world.is_first:
        print(f"final loss {scores['loss']:.6f}")


if __name__ == "__main__":
    with samestep.world(seed=0) as here:
        main(here)
