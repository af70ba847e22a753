"""Mixture-of-experts classifier under fully_shard with a load-balancing term."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM, EXPERTS, BATCH, STEPS = 24, 4, 64, 14


def init():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) / DIM ** 0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) / (2 * DIM) ** 0.5)

    def forward(self, x):
        h = self.norm(x)
        logits = self.router(h)
        prob = logits.softmax(-1)
        top, idx = prob.max(-1)
        pick = F.one_hot(idx, EXPERTS).to(x.dtype)
        hidden = F.silu(torch.einsum("bd,edf->bef", h, self.up))
        out = torch.einsum("bef,efd->bed", hidden, self.down)
        y = (out * (pick * top[:, None])[..., None]).sum(1)

        load = pick.sum(0).detach()
        dist.all_reduce(load)
        load = load / load.sum()
        balance = EXPERTS * (load * prob.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        return x + y, 0.02 * balance + 1e-3 * z, load


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, DIM)
        self.blocks = nn.ModuleList(MoE() for _ in range(2))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x):
        h, extra, loads = self.inp(x), 0.0, []
        for block in self.blocks:
            h, aux, load = block(h)
            extra = extra + aux
            loads.append(load)
        return self.head(h), extra, torch.stack(loads)


def make_data(n=640):
    g = torch.Generator().manual_seed(8)
    centers = 2 * torch.randn(5, 10, generator=g)
    y = torch.randint(0, 5, (n,), generator=g)
    x = centers[y] + torch.randn(n, 10, generator=g)
    return x, (y + (x[:, 0] > 0).long()) % 5


def main():
    mesh = init()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_data()
    torch.manual_seed(21)
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=5)

    g = torch.Generator().manual_seed(5)
    per = BATCH // world
    for step in range(STEPS):
        ids = torch.randint(0, len(x), (BATCH,), generator=g)[rank * per:(rank + 1) * per]
        logits, extra, loads = net(x[ids])
        loss = F.cross_entropy(logits, y[ids]) + extra
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 1:
            used = " ".join(f"{v:.2f}" for v in loads[0].tolist())
            print(f"step {step} loss {shown.item() / world:.5f} expert load {used}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
