"""Denoising model for digit images with a checkpoint in the middle of the run. Each rank draws its own noise."""
import argparse
import io
import math
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU())
        self.inp = nn.Linear(64 + 32, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 64)
        self.register_buffer("freq", torch.exp(torch.linspace(0, 4, 8)))

    def forward(self, x, t):
        angle = t[:, None] * self.freq * 2 * math.pi
        emb = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h = nn.functional.silu(self.inp(torch.cat([x, emb], 1)))
        h = h + nn.functional.silu(self.mid(h))
        return self.out(h)


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
        torch.manual_seed(args.seed)
        self.model = DistributedDataParallel(Denoiser())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.noise = torch.Generator().manual_seed(args.seed + 1 + self.rank)
        self.step = 0

    def advance(self, until):
        while self.step < until:
            g = torch.Generator().manual_seed(10_000 + self.step)
            rows = torch.randperm(len(self.images), generator=g)[:self.args.batch][self.rank::self.world]
            x = self.images[rows]
            t = torch.rand(len(x), generator=self.noise)
            eps = torch.randn(x.shape, generator=self.noise)
            level = torch.cos(t * math.pi / 2)[:, None]
            noisy = level * x + (1 - level ** 2).clamp(min=0).sqrt() * eps
            loss = nn.functional.mse_loss(self.model(noisy, t), eps)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            if self.step % 10 == 0:
                value = loss.detach() / self.world
                dist.all_reduce(value)
                if self.rank == 0:
                    print(f"{self.step} {value.item():.4f}")

    def save(self):
        states = [None] * self.world
        dist.all_gather_object(states, self.noise.get_state())
        blob = io.BytesIO()
        torch.save(dict(model=self.model.module.state_dict(), opt=self.opt.state_dict(),
                        step=self.step, noise=states), blob)
        box = [blob.getvalue()]
        dist.broadcast_object_list(box)
        return box[0]

    def load(self, blob):
        state = torch.load(io.BytesIO(blob))
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.step = state["step"]
        self.noise.set_state(state["noise"][0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--restart-at", type=int, default=20, help="0 runs through")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=40)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = Run(args)
    if args.restart_at:
        run.advance(args.restart_at)
        blob = run.save()
        run = Run(args)
        run.load(blob)
    run.advance(args.steps)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
