"""Simplified graph convolution on a partitioned graph: every process owns a range of
nodes, aggregates into them, and trains on the labelled ones."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

NODES, COMMUNITIES, FEATURES, HOPS = 480, 4, 12, 2


def community_graph():
    gen = torch.Generator().manual_seed(19)
    label = torch.randint(0, COMMUNITIES, (NODES,), generator=gen)
    same = label[:, None] == label[None]
    popularity = 0.4 + 1.6 * torch.rand(NODES, generator=gen) ** 3
    chance = torch.where(same, 0.04, 0.008) * popularity[:, None] * popularity[None]
    upper = torch.triu(torch.rand(NODES, NODES, generator=gen) < chance, 1)
    adjacency = upper | upper.T | torch.eye(NODES, dtype=torch.bool)
    src, dst = adjacency.nonzero().T
    features = torch.randn(COMMUNITIES, FEATURES, generator=gen)[label]
    features = features + 2.5 * torch.randn(NODES, FEATURES, generator=gen)
    labelled = torch.rand(NODES, generator=gen) < 0.4
    return src, dst, features, label, labelled


class Partition:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")
        size = NODES // self.world
        self.lo, self.hi = self.rank * size, (self.rank + 1) * size

    def sum(self, x):
        x = x.clone()
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def gather(self, rows):
        if self.world == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.world)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)


def propagate(part, src, dst, own_features):
    """Symmetrically normalised neighbourhood means of the own nodes, HOPS times."""
    mine = (dst >= part.lo) & (dst < part.hi)
    src, dst = src[mine], dst[mine]
    degree = part.sum(torch.bincount(dst, minlength=NODES)).clamp(min=1)
    weight = (degree[src] * degree[dst]).double().rsqrt()[:, None]
    x = own_features
    stages = [x]
    for _ in range(HOPS):
        everything = part.gather(x)
        x = torch.zeros_like(x).index_add_(0, dst - part.lo, weight * everything[src])
        stages.append(x)
    return torch.cat(stages, 1)


def main():
    part = Partition()
    src, dst, features, label, labelled = community_graph()
    own = slice(part.lo, part.hi)
    x = propagate(part, src, dst, features[own])
    y, train = label[own], labelled[own]

    torch.manual_seed(30)
    net = nn.Sequential(nn.Linear(FEATURES * (HOPS + 1), 32), nn.ELU(), nn.Linear(32, COMMUNITIES))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=5e-4)
    count = part.sum(train.sum()).item()
    for epoch in range(40):
        loss = F.cross_entropy(net(x[train]), y[train], reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            p.grad = part.sum(p.grad)
        optimizer.step()
        if epoch % 10 == 9:
            with torch.no_grad():
                hits = (net(x[~train]).argmax(1) == y[~train]).sum()
            total, accuracy = part.sum(loss.detach()), part.sum(hits) / (NODES - count)
            if part.rank == 0:
                print(f"epoch {epoch + 1} loss {total.item():.10f} accuracy {accuracy.item():.6f}")
    if part.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
