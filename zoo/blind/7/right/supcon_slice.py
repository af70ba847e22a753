"""Supervised contrastive learning over the batch of all processes, then a nearest-centre classifier."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, TAU, STEPS = 64, 0.15, 30


class Gather(torch.autograd.Function):
    """Concatenate over processes; in backward each process keeps the part of its own rows."""

    @staticmethod
    def forward(ctx, x):
        ctx.n = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        r = dist.get_rank()
        return g[r * ctx.n:(r + 1) * ctx.n]


def supcon(z, y):
    sim = z @ z.T / TAU
    eye = torch.eye(len(z), dtype=torch.bool)
    logp = sim - torch.logsumexp(sim.masked_fill(eye, float("-inf")), 1, keepdim=True)
    pos = (y[:, None] == y[None]) & ~eye
    n = pos.sum(1)
    per_anchor = -(logp * pos).sum(1) / n.clamp(min=1)
    return per_anchor[n > 0].mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU())
        self.proj = nn.Linear(80, 16)

    def forward(self, x):
        return F.normalize(self.proj(self.body(x)), dim=1)


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29719").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    torch.manual_seed(18)
    net = Encoder()
    model = DDP(net)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(2)
    for step in range(1, STEPS + 1):
        ids = torch.randint(1400, (BATCH,), generator=gen)
        mine = ids.chunk(world)[rank]
        z = Gather.apply(model(x[mine]))
        loss = supcon(z, y[ids])
        opt.zero_grad()
        (loss * world).backward()
        opt.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    with torch.no_grad():
        f = net(x)
        centre = F.normalize(torch.stack([f[:1400][y[:1400] == c].mean(0) for c in range(10)]), dim=1)
        acc = ((f[1400:] @ centre.T).argmax(1) == y[1400:]).float().mean()
    if rank == 0:
        print(f"nearest centre accuracy {acc.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
