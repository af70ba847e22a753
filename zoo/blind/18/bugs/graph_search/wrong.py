"""Embed small random graphs with a message-passing net; the embedding is judged by nearest-neighbour search."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

NODES, KINDS, DIM = 10, 6, 12


def graphs(count, seed):
    """Each kind has its own density and its own share of marked nodes."""
    gen = torch.Generator().manual_seed(seed)
    kind = torch.arange(count) % KINDS
    density = 0.2 + 0.2 * (kind % 3)
    upper = torch.rand(count, NODES, NODES, generator=gen) < density[:, None, None]
    upper = upper.double().triu(1)
    edges = upper + upper.transpose(1, 2)
    marked = torch.rand(count, NODES, generator=gen) < (0.25 + 0.4 * (kind >= 3).double())[:, None]
    nodes = torch.stack([torch.ones(count, NODES), marked.double(), edges.sum(-1) / NODES], -1)
    return nodes, edges, kind


class Message(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.other = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, h, edges):
        degree = edges.sum(-1, keepdim=True).clamp(min=1)
        return h + F.relu(self.norm(self.own(h) + edges @ self.other(h) / degree))


class GraphNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.start = nn.Linear(3, width)
        self.rounds = nn.ModuleList([Message(width) for _ in range(2)])
        self.embed = nn.Linear(width, DIM)
        self.proxies = nn.Parameter(torch.randn(KINDS, DIM))

    def encode(self, nodes, edges):
        h = self.start(nodes)
        for step in self.rounds:
            h = step(h, edges)
        return F.normalize(self.embed(h.mean(1)), dim=-1)

    def forward(self, nodes, edges):
        return 8 * self.encode(nodes, edges) @ F.normalize(self.proxies, dim=-1).T


def gather(x):
    if not dist.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def evaluate(net, data, rank, world, k=5):
    nodes, edges, kind = data
    ids = torch.arange(len(kind))[rank::world]
    z, y = net.encode(nodes[ids], edges[ids]), kind[ids]
    logits = 8 * z @ F.normalize(net.proxies, dim=-1).T
    bank, bank_y, bank_ids = z, y, ids
    near = z @ bank.T
    near[ids[:, None] == bank_ids[None]] = -2
    found = bank_y[near.topk(k, dim=1).indices]
    hit_1 = gather((found[:, 0] == y).double())
    precision = gather((found == y[:, None]).double().mean(1))
    accuracy = gather((logits.argmax(1) == y).double())
    return {"recall@1": hit_1.mean().item(), f"precision@{k}": precision.mean().item(), "accuracy": accuracy.mean().item()}


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(60)
    net = GraphNet()
    model = DistributedDataParallel(net) if world > 1 else net
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    nodes, edges, kind = graphs(768, seed=61)
    test = graphs(144, seed=62)
    best = 0.0
    for epoch in range(5):
        order = torch.randperm(len(kind), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(48):
            rows = batch[rank::world]
            loss = F.cross_entropy(model(nodes[rows], edges[rows]), kind[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        scores = evaluate(net, test, rank, world)
        best = max(best, scores["recall@1"])
        if rank == 0:
            print(f"epoch {epoch} " + " ".join(f"{name} {value:.6f}" for name, value in scores.items()))
    if rank == 0:
        print(f"best recall@1 {best:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
