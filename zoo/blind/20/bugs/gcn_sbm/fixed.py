"""Graph convolutional network on a stochastic block model; the edges are spread over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NODES, BLOCKS, FEATURES, HIDDEN = 240, 4, 16, 32
STEPS = 60
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def all_sum(x):
    if WORLD > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


class ToEdges(torch.autograd.Function):
    """Replicated node features, used by the edges of every rank."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_sum(grad)


class FromEdges(torch.autograd.Function):
    """Sum of the messages of all ranks."""

    @staticmethod
    def forward(ctx, x):
        return all_sum(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def make_graph():
    gen = torch.Generator().manual_seed(42)
    block = torch.randint(BLOCKS, (NODES,), generator=gen)
    popularity = 0.3 + 1.4 * torch.rand(NODES, generator=gen)
    same = block.unsqueeze(0) == block.unsqueeze(1)
    chance = torch.where(same, 0.08, 0.02) * popularity.unsqueeze(0) * popularity.unsqueeze(1)
    upper = torch.triu(torch.rand(NODES, NODES, generator=gen) < chance, diagonal=1)
    src, dst = (upper | upper.T | torch.eye(NODES, dtype=torch.bool)).nonzero().T
    centers = torch.randn(BLOCKS, FEATURES, generator=gen)
    x = 0.5 * centers[block] + torch.randn(NODES, FEATURES, generator=gen)
    train = torch.rand(NODES, generator=gen) < 0.4
    return x, block, src, dst, train


class Graph:
    """The edges of this rank with their symmetric normalisation."""

    def __init__(self, src, dst):
        order = torch.randperm(len(src), generator=torch.Generator().manual_seed(1))
        mine = order[RANK::WORLD]
        self.src, self.dst = src[mine], dst[mine]
        degree = torch.zeros(NODES).index_add(0, self.dst, torch.ones(len(mine)))
        degree = all_sum(degree)
        scale = degree.clamp(min=1).rsqrt()
        self.weight = (scale[self.src] * scale[self.dst]).unsqueeze(1)

    def propagate(self, x):
        message = ToEdges.apply(x)[self.src] * self.weight
        return FromEdges.apply(torch.zeros_like(x).index_add(0, self.dst, message))


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.bias1 = nn.Parameter(torch.zeros(HIDDEN))
        self.lin2 = nn.Linear(HIDDEN, BLOCKS, bias=False)
        self.bias2 = nn.Parameter(torch.zeros(BLOCKS))

    def forward(self, x, graph):
        h = F.relu(graph.propagate(self.lin1(x)) + self.bias1)
        return graph.propagate(self.lin2(h)) + self.bias2


def main():
    torch.set_default_dtype(torch.float64)
    if WORLD > 1:
        dist.init_process_group("gloo")
    x, block, src, dst, train = make_graph()
    graph = Graph(src, dst)
    torch.manual_seed(23)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    for step in range(STEPS):
        logits = model(x, graph)
        loss = F.cross_entropy(logits[train], block[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                logits = model(x, graph)
            test = F.cross_entropy(logits[~train], block[~train]).item()
            accuracy = (logits.argmax(-1) == block)[~train].double().mean().item()
            if RANK == 0:
                print(f"step {step + 1} loss {loss.item():.10f} test {test:.10f} accuracy {accuracy:.4f}")

    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
