"""Small denoising diffusion model on 8x8 digits; the averaged weights are scored on all ranks."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

T = 100
BATCH = 64
STEPS = 40


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU())
        self.inp = nn.Linear(64, width)
        self.mid = nn.ModuleList(nn.Linear(width + 32, width) for _ in range(2))
        self.out = nn.Linear(width, 64)

    def forward(self, x, t):
        f = torch.exp(-math.log(1000) * torch.arange(8) / 8)
        a = t[:, None].float() * f
        emb = self.time(torch.cat([a.sin(), a.cos()], 1))
        h = torch.nn.functional.silu(self.inp(x))
        for layer in self.mid:
            h = h + torch.nn.functional.silu(layer(torch.cat([h, emb], 1)))
        return self.out(h)


class Ema:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for a, b in zip(self.net.parameters(), net.parameters()):
            a.lerp_(b, 1 - self.decay)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29631")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(40 + rank)

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    keep = torch.cos((torch.arange(T + 1) / T + 0.008) / 1.008 * math.pi / 2) ** 2
    keep = (keep / keep[0]).clamp(min=1e-4)

    net = Denoiser()
    ema = Ema(net, 0.97)
    ddp = DDP(net)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    gen = torch.Generator().manual_seed(5)

    def noised(rows, g):
        t = torch.randint(1, T + 1, (len(rows),), generator=g)
        eps = torch.randn(len(rows), 64, generator=g)
        a = keep[t].unsqueeze(1)
        return a.sqrt() * rows + (1 - a).sqrt() * eps, t, eps

    for step in range(1, STEPS + 1):
        rows = x[torch.randint(1600, (BATCH,), generator=gen)]
        xt, t, eps = (v.chunk(world)[rank] for v in noised(rows, gen))
        loss = (ddp(xt, t) - eps).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        if step % 20 == 0:
            xt, t, eps = (v[rank::world] for v in noised(x[1600:], torch.Generator().manual_seed(6)))
            with torch.no_grad():
                s = torch.stack([(ema.net(xt, t) - eps).square().sum(), torch.tensor(eps.numel() * 1.0)])
            dist.all_reduce(s)
            if rank == 0:
                print(f"step {step} averaged weights, validation {(s[0] / s[1]).item():.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
