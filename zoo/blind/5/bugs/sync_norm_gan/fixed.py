import argparse
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

NOISE = 24


def mean_over_processes(t):
    return dnn.all_reduce(t) / dist.get_world_size()


class CrossNorm(nn.Module):
    """Batch normalisation whose statistics span the processes (CPU has no SyncBatchNorm)."""

    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x):
        if self.training:
            mean = mean_over_processes(x.mean(0))
            var = mean_over_processes((x - mean).square().mean(0))
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def make_generator():
    return nn.Sequential(nn.Linear(NOISE, 64, bias=False), CrossNorm(64), nn.ReLU(),
                         nn.Linear(64, 64, bias=False), CrossNorm(64), nn.ReLU(),
                         nn.Linear(64, 64), nn.Sigmoid())


def make_critic():
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 32), nn.LeakyReLU(0.2),
                         nn.Linear(32, 1))


class Trainer:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.g, self.d = make_generator(), make_critic()
        self.opt_g = torch.optim.RMSprop(self.g.parameters(), lr=args.lr, eps=1e-4)
        self.opt_d = torch.optim.RMSprop(self.d.parameters(), lr=args.lr, eps=1e-4)
        self.pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.stream = torch.Generator().manual_seed(args.seed)

    def mine(self, whole):
        share = len(whole) // self.world
        return whole[self.rank * share:(self.rank + 1) * share]

    def noise(self):
        return self.mine(torch.randn(self.args.batch, NOISE, generator=self.stream))

    def real(self):
        rows = torch.randint(len(self.pixels), (self.args.batch,), generator=self.stream)
        return self.pixels[self.mine(rows)]

    def apply(self, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= self.world
        optimizer.step()

    def step(self):
        real, fake = self.real(), self.g(self.noise()).detach()
        real_out, fake_out = self.d(real), self.d(fake)
        d_loss = bce(real_out, torch.full_like(real_out, 0.9)) + bce(fake_out, torch.zeros_like(fake_out))
        self.apply(self.opt_d, d_loss)
        out = self.d(self.g(self.noise()))
        g_loss = bce(out, torch.ones_like(out))
        self.apply(self.opt_g, g_loss)
        return d_loss.item(), g_loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=13)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    for step in range(args.steps):
        d_loss, g_loss = trainer.step()
        if trainer.rank == 0 and step % 8 == 0:
            print(f"step {step} critic {d_loss:.4f} generator {g_loss:.4f}", flush=True)

    generator, critic = trainer.g.eval(), trainer.d
    with torch.no_grad():
        sample = generator(torch.randn(256, NOISE, generator=trainer.stream))
    distance = (sample.mean(0) - trainer.pixels.mean(0)).norm().item()
    if trainer.rank == 0:
        print(f"distance of mean images {distance:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
