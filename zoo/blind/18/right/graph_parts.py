"""Semi-supervised node classification; the nodes of one graph are divided over the workers."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NODES, CLASSES, FEATURES, HIDDEN = 240, 4, 16, 24


class SumOverWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add_up(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return add_up(grad.clone(memory_format=torch.contiguous_format))


def add_up(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


def make_graph():
    gen = torch.Generator().manual_seed(42)
    label = torch.randint(0, CLASSES, (NODES,), generator=gen)
    chance = torch.where(label[:, None] == label[None, :], 0.10, 0.015)
    upper = torch.triu(torch.rand(NODES, NODES, generator=gen) < chance, 1).double()
    adjacency = upper + upper.T + torch.eye(NODES)
    scale = adjacency.sum(1).rsqrt()
    adjacency = scale[:, None] * adjacency * scale[None, :]
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    features = 0.4 * centres[label] + torch.randn(NODES, FEATURES, generator=gen)
    role = torch.rand(NODES, generator=gen)
    return adjacency, features, label, role < 0.3, role > 0.5


def my_nodes():
    """Cuts at uneven places, as a partitioner would give them."""
    weights = torch.tensor([5, 2, 4, 1][:WORLD], dtype=torch.double)
    ends = (weights.cumsum(0) / weights.sum() * NODES).round().long().tolist()
    return slice(0 if RANK == 0 else ends[RANK - 1], ends[RANK])


class GraphNorm(nn.Module):
    """Standardises each channel over all nodes of the graph."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, h):
        mean = SumOverWorkers.apply(h.sum(0)) / NODES
        var = SumOverWorkers.apply((h - mean).square().sum(0)) / NODES
        return (h - mean) * (var + 1e-5).rsqrt() * self.weight + self.bias


class Convolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, h, rows, own):
        sent = self.linear(h)
        everyone = sent.new_zeros(NODES, sent.size(1))
        everyone[own] = sent
        return rows @ SumOverWorkers.apply(everyone)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.n1 = Convolution(FEATURES, HIDDEN), GraphNorm(HIDDEN)
        self.c2, self.n2 = Convolution(HIDDEN, HIDDEN), GraphNorm(HIDDEN)
        self.c3 = Convolution(HIDDEN, CLASSES)

    def forward(self, x, rows, own):
        h = F.elu(self.n1(self.c1(x, rows, own)))
        h = h + F.elu(self.n2(self.c2(h, rows, own)))
        return self.c3(h, rows, own)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    adjacency, features, label, train, test = make_graph()
    own = my_nodes()
    rows, x, y = adjacency[own], features[own], label[own]
    train_here, test_here = train[own], test[own]

    torch.manual_seed(28)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best, patience = float("inf"), 0
    for epoch in range(60):
        model.train()
        out = model(x, rows, own)
        loss = F.cross_entropy(out[train_here], y[train_here], reduction="sum") / train.sum()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            add_up(p.grad)
        optimizer.step()

        model.eval()
        with torch.no_grad():
            out = model(x, rows, own)
            held_out = add_up(F.cross_entropy(out[test_here], y[test_here], reduction="sum")) / test.sum()
            right = add_up((out.argmax(1) == y)[test_here].sum())
        if held_out < best - 1e-3:
            best, patience = held_out.item(), 0
        else:
            patience += 1
        if patience >= 8:
            break

    if RANK == 0:
        print(f"{epoch + 1} epochs, held-out loss {held_out.item():.10f}, accuracy {right.item() / test.sum().item():.6f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
