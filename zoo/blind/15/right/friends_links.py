"""Link prediction on a graph of friends: a two-layer graph network over the whole graph, edges as samples.

The graph is small, so every process encodes all of it and scores only its own part of a batch's edges. In each step a
tenth of the graph's edges is left out of the messages (DropEdge); left-out edges are the same for the whole batch.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PEOPLE, GROUPS, BATCH, EPOCHS = 160, 5, 96, 5


def make_graph():
    rng = np.random.default_rng(12)
    group = rng.integers(GROUPS, size=PEOPLE)
    chance = np.where(group[:, None] == group[None], 0.22, 0.012)
    edges = np.argwhere(np.triu(rng.uniform(size=(PEOPLE, PEOPLE)) < chance, 1))
    edges = edges[rng.permutation(len(edges))]
    known = {tuple(e) for e in edges.tolist()}
    features = np.eye(GROUPS)[group] + 1.5 * rng.normal(size=(PEOPLE, GROUPS))
    return torch.tensor(edges), known, torch.tensor(features, dtype=torch.float32)


class Edges(Dataset):
    def __init__(self, edges, known, fixed=False):
        self.edges, self.known, self.epoch, self.fixed = edges, known, 0, fixed

    def __len__(self):
        return len(self.edges)

    def __getitem__(self, i):
        """The edge and one stranger for its first end."""
        a, b = self.edges[i].tolist()
        rng = np.random.default_rng([99 if self.fixed else self.epoch, i])
        while True:
            c = int(rng.integers(PEOPLE))
            if c != a and (min(a, c), max(a, c)) not in self.known:
                return a, b, c


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.name = nn.Embedding(PEOPLE, 8)
        self.one = nn.Linear(GROUPS + 8, 32)
        self.two = nn.Linear(32, width)
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def encode(self, features, message):
        h = torch.cat([features, self.name.weight], 1)
        h = F.elu(self.one(message @ h))
        return self.two(message @ h)

    def forward(self, features, message, a, b, c):
        h = self.encode(features, message)
        return (h[a] * h[b]).sum(1) + self.bias, (h[a] * h[c]).sum(1) + self.bias


def messages(edges):
    adjacency = torch.eye(PEOPLE)
    adjacency[edges[:, 0], edges[:, 1]] = 1
    adjacency[edges[:, 1], edges[:, 0]] = 1
    degree = adjacency.sum(1).rsqrt()
    return degree[:, None] * adjacency * degree


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(31)
    edges, known, features = make_graph()
    count = len(edges) * 8 // 10 // BATCH * BATCH
    train, held = Edges(edges[:count], known), Edges(edges[count:], known, fixed=True)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=1)
    loader = DataLoader(train, BATCH // world, sampler=sampler)

    net = Net()
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-3, eps=1e-6)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        value = 0.0
        for a, b, c in loader:
            keep = torch.rand(count, generator=torch.Generator().manual_seed(step)) > 0.1
            friend, stranger = model(features, messages(train.edges[keep]), a, b, c)
            loss = F.softplus(-friend).mean() + F.softplus(stranger).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value += loss.item() / len(loader)
            step += 1
        with torch.no_grad():
            mine = [held[i] for i in range(rank, len(held), world)]
            scores = net(features, messages(train.edges), *torch.tensor(mine).T)
        report = [(value, *(s.tolist() for s in scores))]
        if world > 1:
            report = [None] * world if rank == 0 else None
            dist.gather_object((value, *(s.tolist() for s in scores)), report)
        if rank == 0:
            friend = sum((r[1] for r in report), [])
            stranger = sum((r[2] for r in report), [])
            auc = roc_auc_score([1] * len(friend) + [0] * len(stranger), friend + stranger)
            print(f"epoch {epoch} loss {sum(r[0] for r in report) / world:.4f} auc {auc:.4f} of {len(friend)}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
