"""Topics of papers in a citation graph: full graph convolutions with the edges divided among the processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
PAPERS, TOPICS, WORDS = 300, 4, 24


def citations(seed):
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, TOPICS, (PAPERS,), generator=g)
    fame = torch.rand(PAPERS, generator=g) ** 2
    same = topic[:, None] == topic[None]
    chance = torch.where(same, 0.08, 0.012) * (0.3 + 2 * fame)[None]
    a = torch.rand(PAPERS, PAPERS, generator=g) < chance
    a = (a | a.T).fill_diagonal_(True)
    words = torch.randn(TOPICS, WORDS, generator=g)[topic] * 0.4 + torch.randn(PAPERS, WORDS, generator=g)
    train = torch.rand(PAPERS, generator=g) < 0.4
    return a.nonzero().T.contiguous(), words, topic, train


class EdgePart:
    """The edges of one process with their symmetric normalisation."""

    def __init__(self, edges, rank, world):
        self.edges = edges[:, rank::world]
        degree = torch.bincount(edges[1], minlength=PAPERS).clamp(min=1)
        scale = degree.double().rsqrt()
        source, target = self.edges
        self.weight = (scale[source] * scale[target])[:, None]

    def aggregate(self, x):
        source, target = self.edges
        return torch.zeros_like(x).index_add(0, target, self.weight * x[source])


class SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x, part):
        return SumParts.apply(part.aggregate(self.linear(x))) + self.bias


class GCN(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.one = GraphConv(WORDS, hidden)
        self.two = GraphConv(hidden, TOPICS)

    def forward(self, x, part):
        return self.two(F.relu(self.one(x, part)), part)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    edges, words, topic, train = citations(3)
    part = EdgePart(edges, rank, world)
    torch.manual_seed(14)
    model = GCN()
    opt = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    for step in range(50):
        model.train()
        logits = model(words, part)
        loss = F.cross_entropy(logits[train], topic[train])
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1} loss {loss:.8f}")
    model.eval()
    with torch.no_grad():
        logits = model(words, part)
    if rank == 0:
        right = (logits.argmax(1) == topic)[~train].double().mean()
        print(f"other papers loss {F.cross_entropy(logits[~train], topic[~train]):.8f} accuracy {right:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
