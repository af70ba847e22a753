import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class AllNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, sizes):
        ctx.sizes = sizes
        whole = torch.zeros(sum(sizes), local.size(1))
        begin = sum(sizes[:RANK])
        whole[begin:begin + sizes[RANK]] = local
        if WORLD > 1:
            dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if WORLD > 1:
            dist.all_reduce(grad)
        return grad.split(ctx.sizes)[RANK], None


class TotalOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if WORLD > 1:
            dist.all_reduce(grad)
        return grad


class GraphNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.ones(dim))

    def forward(self, h, nodes):
        h = h - self.shift * TotalOver.apply(h.sum(0)) / nodes
        var = TotalOver.apply(h.square().sum(0)) / nodes
        return h * torch.rsqrt(var + 1e-5) * self.weight + self.bias


class GCN(nn.Module):
    def __init__(self, sizes, dim=24):
        super().__init__()
        self.sizes = sizes
        self.lin1, self.lin2 = nn.Linear(64, dim, bias=False), nn.Linear(dim, 10)
        self.root = nn.Linear(64, dim, bias=False)
        self.norm = GraphNorm(dim)

    def forward(self, x, rows):
        h = torch.sparse.mm(rows, AllNodes.apply(self.lin1(x), self.sizes)) + self.root(x)
        h = F.elu(self.norm(h, sum(self.sizes)))
        return torch.sparse.mm(rows, AllNodes.apply(self.lin2(h), self.sizes))


def neighbour_graph(x, k=6):
    near = torch.cdist(x, x).fill_diagonal_(float("inf")).topk(k, largest=False).indices
    adjacency = torch.zeros(len(x), len(x)).scatter_(1, near, 1.0)
    adjacency = torch.maximum(adjacency, adjacency.T) + torch.eye(len(x))
    degree = adjacency.sum(1).rsqrt()
    return degree[:, None] * adjacency * degree[None]


def partition(n):
    cuts = [round(n * (r / WORLD) ** 1.2) for r in range(WORLD + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:])]


def add_gradients(model):
    if WORLD == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    x = torch.tensor(digits.data[:603] / 16.0, dtype=torch.get_default_dtype())
    y = torch.tensor(digits.target[:603])
    kind = torch.randperm(603, generator=torch.Generator().manual_seed(2)) % 10
    sizes = partition(603)
    begin = sum(sizes[:RANK])
    here = slice(begin, begin + sizes[RANK])
    rows = neighbour_graph(x)[here].to_sparse()
    x, y, kind = x[here], y[here], kind[here]
    labelled = torch.tensor([(kind == 0).sum(), (kind == 1).sum(), (kind > 1).sum()])
    if WORLD > 1:
        dist.all_reduce(labelled)

    torch.manual_seed(1)
    model = GCN(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    for epoch in range(40):
        model.train()
        optimizer.zero_grad()
        logits = model(x, rows)
        loss = F.cross_entropy(logits[kind == 0], y[kind == 0], reduction="sum") / labelled[0]
        loss.backward()
        add_gradients(model)
        optimizer.step()
        if epoch % 10 == 9:
            with torch.no_grad():
                logits = model(x, rows)
                right = logits.argmax(1) == y
                seen = torch.stack([loss.detach(), F.cross_entropy(logits[kind == 1], y[kind == 1], reduction="sum") / labelled[1],
                                    right[kind == 1].sum() / labelled[1], right[kind > 1].sum() / labelled[2]])
            if WORLD > 1:
                dist.all_reduce(seen)
            if RANK == 0:
                print("epoch %d loss %.5f val %.5f acc %.4f test acc %.4f" % (epoch, *seen.tolist()))
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
