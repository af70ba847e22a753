"""GraphSAGE with neighbour sampling on a graph of communities (node classification).

Mini-batches of nodes from a DistributedSampler, two hops of sampled neighbours made
by the loader's collate function, DDP, ZeroRedundancyOptimizer, cosine schedule.
Test nodes are scored with all of their neighbours.
"""
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

NODES, CLASSES, FEATURES, FANOUT = 700, 5, 16, 4


def community_graph(seed=5):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, NODES)
    chance = np.where(label[:, None] == label[None, :], 0.05, 0.006)
    upper = np.triu(rng.random((NODES, NODES)) < chance, 1)
    linked = upper | upper.T | np.eye(NODES, dtype=bool)
    centre = rng.normal(size=(CLASSES, FEATURES))
    features = 0.6 * centre[label] + rng.normal(size=(NODES, FEATURES))
    return torch.tensor(features, dtype=torch.float32), torch.tensor(label), [np.flatnonzero(row) for row in linked]


class NeighbourSampler:
    """Draws FANOUT neighbours of a node. Each (epoch, hop, node) has numbers of its own."""

    def __init__(self, neighbours):
        self.neighbours, self.epoch = neighbours, 0

    def draw(self, node, hop):
        rng = np.random.default_rng([17, self.epoch, hop, node])
        return rng.choice(self.neighbours[node], FANOUT)

    def __call__(self, nodes):
        first = np.stack([np.concatenate([[n], self.draw(n, 0)]) for n in nodes])            # b, 1 + f
        second = np.stack([[self.draw(n, 1) for n in row] for row in first])                 # b, 1 + f, f
        return torch.tensor(nodes), torch.tensor(first), torch.tensor(second)


class Sage(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.own1, self.near1 = nn.Linear(FEATURES, hidden), nn.Linear(FEATURES, hidden, bias=False)
        self.own2, self.near2 = nn.Linear(hidden, CLASSES), nn.Linear(hidden, CLASSES, bias=False)

    def first(self, own, near):
        return F.elu(self.own1(own) + self.near1(near))

    def second(self, own, near):
        return self.own2(own) + self.near2(near)

    def forward(self, own, near):                  # features of (node + its neighbours), and of their neighbours
        hidden = self.first(own, near.mean(2))
        return self.second(hidden[:, 0], hidden[:, 1:].mean(1))


@torch.no_grad()
def test(model, features, labels, neighbours, nodes):
    hidden = torch.stack([model.first(features[n], features[neighbours[n]].mean(0)) for n in range(NODES)])
    hits = sum(int(model.second(hidden[n], hidden[neighbours[n]].mean(0)).argmax() == labels[n]) for n in nodes)
    total = torch.tensor([hits, len(nodes)])
    dist.all_reduce(total)
    return total[0].item(), total[1].item()


def main():
    rank, world = int(os.environ.setdefault("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29613")
    dist.init_process_group("gloo")
    torch.manual_seed(100 * rank)

    features, labels, neighbours = community_graph()
    order = np.random.default_rng(6).permutation(NODES).tolist()
    train, held_out = order[:500], order[500:]
    draw = NeighbourSampler(neighbours)
    sampler = DistributedSampler(train, seed=2, drop_last=True)
    loader = DataLoader(train, batch_size=48 // world, sampler=sampler, collate_fn=draw, drop_last=True)

    model = DistributedDataParallel(Sage())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.02, weight_decay=0.05)
    epochs = 4
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (epochs * len(loader)))))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        draw.epoch = epoch
        total = torch.zeros(2)
        for nodes, first, second in loader:
            loss = F.cross_entropy(model(features[first], features[second]), labels[nodes])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += torch.tensor([loss.item() * len(nodes), len(nodes)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}, rate {schedule.get_last_lr()[0]:.5f}")
    hits, count = test(model.module, features, labels, neighbours, held_out[rank::world])
    if rank == 0:
        print(f"test: {hits} of {count} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
