"""samestep: micro-batches of masked sequences, weighted by their tokens."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

VOCABULARY, LENGTH = 20, 12


def sentences(n):
    g = torch.Generator().manual_seed(2)
    x = torch.randint(1, VOCABULARY, (n, LENGTH), generator=g)
    mask = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (n, 1), generator=g)
    return TensorDataset(x, (x * 3) % VOCABULARY, mask)


def main():
    with samestep.world() as world:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, VOCABULARY))
        model = samestep.replicate(net, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        batches = samestep.shards(
            sentences(131),
            world,
            batch_size=32,
            micro_batch_size=8,
            weight=lambda batch: int(batch[2].sum()),
            seed=3,
        )
        for epoch in range(3):
            for x, y, mask in batches:
                losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
                batches.mean(losses, mask).backward()
                if batches.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
            if world.is_first:
                print(f"epoch {epoch}: {batches.loss:.4f}")


if __name__ == "__main__":
    main()
