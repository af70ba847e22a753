import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class FlatShardedAdam:
    """Adam over one flat vector; each rank keeps the moments of its contiguous part only."""

    def __init__(self, params, lr=3e-3, betas=(0.9, 0.99), eps=1e-5):
        self.params = list(params)
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        total = sum(p.numel() for p in self.params)
        self.part = -(-total // self.world)
        self.total = total
        self.exp_avg = torch.zeros(self.part)
        self.exp_avg_sq = torch.zeros(self.part)

    def _pad(self, v):
        return F.pad(v, (0, self.part * self.world - self.total))

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        flat_grad = self._pad(torch.cat([p.grad.flatten() for p in self.params]))
        dist.all_reduce(flat_grad)
        lo, hi = self.rank * self.part, (self.rank + 1) * self.part
        g = flat_grad[lo:hi] / self.world
        self.exp_avg.lerp_(g, 1 - b1)
        self.exp_avg_sq.lerp_(g * g, 1 - b2)
        denom = (self.exp_avg_sq / (1 - b2 ** self.t)).sqrt() + self.eps
        mine = self._pad(parameters_to_vector(self.params))[lo:hi]
        mine = mine - self.lr / (1 - b1 ** self.t) * self.exp_avg / denom
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        vector_to_parameters(torch.cat(parts)[: self.total], self.params)

    def state_dict(self):
        full = {}
        for key, mine in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            full[key] = torch.cat(parts)[: self.total]
        return {"t": self.t, **full}

    def load_state_dict(self, sd):
        self.t = sd["t"]
        lo, hi = self.rank * self.part, (self.rank + 1) * self.part
        self.exp_avg.copy_(self._pad(sd["exp_avg"])[lo:hi])
        self.exp_avg_sq.copy_(self._pad(sd["exp_avg_sq"])[lo:hi])


def toy_batches(start, stop, rows):
    for s in range(start, stop):
        g = torch.Generator().manual_seed(500 + s)
        x = torch.randn(rows, 16, generator=g)
        yield s, x, torch.stack([x[:, :8].prod(1).sign(), (x[:, 8:] ** 2).sum(1) / 8], dim=1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=20)
    ap.add_argument("--out", type=pathlib.Path, default=pathlib.Path("ckpt_zero1"))
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    opt = FlatShardedAdam(net.parameters())
    start = 0
    if args.resume:
        ck = torch.load(args.resume)
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        start = ck["step"]
    args.out.mkdir(exist_ok=True)
    for s, x, y in toy_batches(start, args.steps, 64):
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.mse_loss(net(x), y)
        net.zero_grad()
        loss.backward()
        opt.step()
        if (s + 1) % args.save_every == 0:
            state = {"net": net.state_dict(), "opt": opt.state_dict(), "step": s + 1}
            if rank == 0:
                torch.save(state, args.out / f"step{s + 1}.pt")
                print(f"step {s + 1} loss {loss.item():.4f} -> {args.out}/step{s + 1}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
