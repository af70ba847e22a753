"""Graph convolution with the nodes cut into blocks, one block of rows of the adjacency per rank.

A weight is averaged and updated as soon as its gradient is complete; there is no separate optimizer step.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

NODES, KINDS, FEATURES, HIDDEN, EPOCHS = 240, 4, 12, 16, 25


class Neighbours(torch.autograd.Function):
    """Rows of all ranks; on the way back a row collects what every rank made of it."""

    @staticmethod
    def forward(ctx, rows):
        ctx.many = dist.is_initialized()
        if not ctx.many:
            return rows.clone()
        out = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(out, rows.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.many:
            return grad
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.two = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.read = nn.Linear(HIDDEN, KINDS)

    def forward(self, x, rows_of_adjacency):
        h = F.relu(rows_of_adjacency @ Neighbours.apply(self.one(x)))
        h = h + F.relu(rows_of_adjacency @ Neighbours.apply(self.two(h)))
        return self.read(h)


def block_model():
    g = torch.Generator().manual_seed(10)
    kind = torch.randint(0, KINDS, (NODES,), generator=g)
    chance = torch.where(kind[:, None] == kind[None, :], 0.12, 0.02)
    upper = (torch.rand(NODES, NODES, generator=g) < chance).triu(1)
    adjacency = (upper | upper.T).double() + torch.eye(NODES, dtype=torch.float64)
    scale = adjacency.sum(1).rsqrt()
    x = torch.randn(NODES, FEATURES, generator=g, dtype=torch.float64)
    x[:, :KINDS] += 0.7 * F.one_hot(kind, KINDS)
    lot = torch.rand(NODES, generator=g)
    return scale[:, None] * adjacency * scale[None, :], x, kind, lot < 0.3, lot > 0.6


def update_in_backward(model, lr):
    """One small Adam per tensor, run by the hook that sees the finished gradient."""
    optimizers = {p: torch.optim.Adam([p], lr=lr, weight_decay=5e-4) for p in model.parameters()}

    def finish(p):
        if dist.is_initialized():
            dist.all_reduce(p.grad)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(finish)
    return optimizers


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1

    adjacency, x, kind, train, valid = block_model()
    mine = torch.arange(NODES).chunk(world)[rank]
    torch.manual_seed(2)
    model = GCN().double()
    update_in_backward(model, lr=0.02)
    labelled = train.sum()
    best, kept = -1.0, None

    for epoch in range(EPOCHS):
        logits = model(x[mine], adjacency[mine])
        here = train[mine]
        loss = F.cross_entropy(logits[here], kind[mine][here], reduction="sum") / labelled
        loss.backward()

        with torch.no_grad():
            logits = model(x[mine], adjacency[mine])
            right = (logits.argmax(1) == kind[mine]) & valid[mine]
            numbers = torch.stack([loss.detach(), right.sum().double(), valid[mine].sum().double()])
        if world > 1:
            dist.all_reduce(numbers)
        score = (numbers[1] / numbers[2]).item()
        if score > best:
            best, kept = score, {k: v.clone() for k, v in model.state_dict().items()}
        if rank == 0 and epoch % 8 == 0:
            print(f"epoch {epoch}: loss {numbers[0]:.10f} valid {score:.4f}")

    model.load_state_dict(kept)
    size = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
    if rank == 0:
        print(f"best {best:.4f} weights {size:.10f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
