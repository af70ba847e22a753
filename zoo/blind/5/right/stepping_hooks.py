"""Autoencoder trained with one optimizer per tensor; each steps during backward, so that few gradients live at a time."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits


class BackwardStepper:
    def __init__(self, net, lr, warmup):
        self.opts, self.plans = {}, []
        for p in net.parameters():
            self.opts[p] = torch.optim.Adam([p], lr=lr)
            self.plans.append(torch.optim.lr_scheduler.LambdaLR(self.opts[p], lambda t: min(1.0, (t + 1) / warmup)))
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        self.opts[p].step()
        p.grad = None

    def advance(self):
        for plan in self.plans:
            plan.step()


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 40), nn.ELU(), nn.Linear(40, 12))
        self.decode = nn.Sequential(nn.Linear(12, 40), nn.ELU(), nn.Linear(40, 64))

    def forward(self, x):
        return self.decode(self.encode(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.manual_seed(2)
    net = AutoEncoder()
    stepper = BackwardStepper(net, args.lr, warmup=10)
    g = torch.Generator().manual_seed(77)
    for step in range(args.steps):
        batch = x[torch.randperm(len(x), generator=g)[:args.batch]]
        mine = batch[rank::world]
        (net(mine) - mine).square().mean().backward()
        stepper.advance()
        if step % 12 == 11:
            with torch.no_grad():
                err = (net(x[rank::world]) - x[rank::world]).square().sum()
            dist.all_reduce(err)
            if rank == 0:
                print(f"step {step + 1} reconstruction {err.item() / x.numel():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
