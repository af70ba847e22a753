"""Full-graph GCN on a citation-like graph whose nodes are partitioned over the processes."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

NODES, CLASSES, FEATURES, HIDDEN = 240, 4, 12, 16
STEPS = 25


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if not dist.is_initialized():
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        if not dist.is_initialized():
            return grad
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def make_graph():
    g = torch.Generator().manual_seed(5)
    label = torch.randint(0, CLASSES, (NODES,), generator=g)
    same = label[:, None] == label[None, :]
    popular = torch.rand(NODES, generator=g).pow(2) * 2
    p = torch.where(same, 0.06, 0.008) * (popular[:, None] + popular[None, :])
    upper = torch.triu(torch.rand(NODES, NODES, generator=g) < p, diagonal=1)
    adjacency = upper | upper.T | torch.eye(NODES, dtype=torch.bool)
    edges = adjacency.nonzero().T
    centre = torch.randn(CLASSES, FEATURES, generator=g)
    x = 0.6 * centre[label] + torch.randn(NODES, FEATURES, generator=g)
    train = torch.rand(NODES, generator=g) < 0.4
    return x.double(), edges, label, train


class Partition:
    """The block of nodes a process owns and all edges that point into it."""

    def __init__(self, edges, rank, world):
        size = NODES // world
        self.lo, self.hi = rank * size, (rank + 1) * size
        src, dst = edges
        mine = (dst >= self.lo) & (dst < self.hi)
        self.src, self.dst = src[mine], dst[mine]
        degree = torch.bincount(self.dst, minlength=NODES)
        if world > 1:
            dist.all_reduce(degree)
        scale = degree.clamp(min=1).double().rsqrt()
        self.weight = (scale[self.src] * scale[self.dst]).unsqueeze(1)

    def propagate(self, h):
        full = GatherRows.apply(h)
        out = torch.zeros(self.hi - self.lo, h.shape[1], dtype=h.dtype)
        return out.index_add(0, self.dst - self.lo, full[self.src] * self.weight)


def forward(params, part, x):
    w1, b1, w2, b2 = params
    h = torch.relu(part.propagate(x @ w1) + b1)
    return part.propagate(h @ w2) + b2


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    x, edges, label, train = make_graph()
    part = Partition(edges, rank, world)
    own = slice(part.lo, part.hi)
    x, label, train = x[own], label[own], train[own]

    torch.manual_seed(1)
    params = [
        torch.randn(FEATURES, HIDDEN, dtype=torch.float64) * 0.3,
        torch.zeros(HIDDEN, dtype=torch.float64),
        torch.randn(HIDDEN, CLASSES, dtype=torch.float64) * 0.3,
        torch.zeros(CLASSES, dtype=torch.float64),
    ]
    for p in params:
        p.requires_grad_()
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=5e-4)
    labelled = train.sum()
    if world > 1:
        dist.all_reduce(labelled)

    for step in range(STEPS):
        logits = forward(params, part, x)
        loss = F.cross_entropy(logits[train], label[train], reduction="sum") / labelled
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            for p in params:
                dist.all_reduce(p.grad)
        optimizer.step()
        if step % 8 == 0:
            shown = loss.detach().clone()
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.8f}")

    with torch.no_grad():
        right = (forward(params, part, x).argmax(1) == label)[~train].sum()
    counts = torch.stack([right, (~train).sum()])
    if world > 1:
        dist.all_reduce(counts)
    if rank == 0:
        print(f"accuracy {counts[0].item()}/{counts[1].item()}")
        print(f"weight norm {sum(p.detach().square().sum() for p in params).item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
