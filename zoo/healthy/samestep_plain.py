"""samestep: a global batch size, an uneven data set, an exact evaluation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def main():
    with samestep.world() as world:
        torch.manual_seed(0)
        digits = load_digits()
        x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
        train_set, test_set = TensorDataset(x[:501], y[:501]), TensorDataset(x[501:778], y[501:778])
        model = samestep.replicate(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        batches = samestep.shards(train_set, world, batch_size=64, seed=0)
        for epoch in range(3):
            for images, labels in batches:
                loss = batches.mean(F.cross_entropy(model(images), labels, reduction="none"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            scores = samestep.evaluate(
                lambda batch: (model(batch[0]), batch[1]),
                test_set,
                world,
                batch_size=100,
                metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).double().mean()},
            )
            if world.is_first:
                print(f"epoch {epoch}: loss {batches.loss:.4f}, accuracy {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main()
