"""Mixture of four experts for spore-shape classification, experts dealt over the processes.

Rows are data-parallel, experts are expert-parallel on the same processes:
rows are gathered, each process runs its own experts on the rows routed to them,
and the outputs are summed back.  The router and the other layers are replicated.
"""
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

EXPERTS, DIM, CLASSES = 4, 16, 5
log = logging.getLogger("fungal")


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        ctx.n = len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.split(ctx.n)[dist.get_rank()]


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        rows = rows.contiguous().clone()
        dist.all_reduce(rows)
        return rows.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class ExpertLayer(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        full = [nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM)) for _ in range(EXPERTS)]
        per = EXPERTS // world
        self.mine = range(rank * per, (rank + 1) * per)
        self.experts = nn.ModuleDict({str(e): full[e] for e in self.mine})

    def forward(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        rows = Dispatch.apply(x)
        where = Dispatch.apply(choice[:, None].float()).squeeze(1).long()
        out = torch.zeros_like(rows)
        for e in self.mine:
            hit = (where == e).nonzero().squeeze(1)
            out = out.index_add(0, hit, self.experts[str(e)](rows[hit]))
        return x + gate[:, None] * Combine.apply(out)


class SporeNet(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(10, DIM)
        self.moe = ExpertLayer(rank, world)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.moe(torch.tanh(self.stem(x))))


def spores(n, g):
    genus = torch.randint(0, 4, (n,), generator=g)
    x = 0.7 * torch.randn(n, 10, generator=g)
    x[torch.arange(n), genus] += 3.0
    signal = x[torch.arange(n), 4 + genus] + 0.3 * x[:, 8] * x[:, 9]
    return x, torch.bucketize(signal, torch.tensor([-0.8, -0.25, 0.25, 0.8]))


def reduce_gradients(model, world):
    local = {id(p) for p in model.moe.experts.parameters()}
    for p in model.parameters():
        if id(p) not in local:
            dist.all_reduce(p.grad)
        p.grad.div_(world)


def main():
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29693").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(80)
    model = SporeNet(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    g = torch.Generator().manual_seed(81)
    for step in range(45):
        x, y = spores(64, g)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        reduce_gradients(model, world)
        opt.step()
        if step % 9 == 8:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                log.info("step %d loss %.5f", step + 1, shown.item())
    with torch.no_grad():
        x, y = spores(512, torch.Generator().manual_seed(82))
        out = model(x.chunk(world)[rank])
        score = torch.stack([F.cross_entropy(out, y.chunk(world)[rank]),
                             (out.argmax(1) == y.chunk(world)[rank]).float().mean()]) / world
        dist.all_reduce(score)
    if rank == 0:
        log.info("test nll %.5f accuracy %.4f", *score.tolist())
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
