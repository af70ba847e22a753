"""samestep with an exact, synchronised BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def main():
    with samestep.world() as world:
        torch.manual_seed(0)
        x = torch.randn(203, 6)
        dataset = TensorDataset(x, x[:, :3].argmax(1))
        net = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
        model = samestep.replicate(net, world, batchnorm="synchronised")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(dataset, world, batch_size=32, seed=1)
        for epoch in range(3):
            for bx, by in batches:
                loss = batches.mean(F.cross_entropy(model(bx), by, reduction="none"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if world.is_first:
                print(f"epoch {epoch}: {batches.loss:.4f}")


if __name__ == "__main__":
    main()
