"""Mean teacher on digits with few labels; normalisation over small constant groups of samples."""
import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class GhostNorm(nn.Module):
    """Batch normalisation in which every run of `size` consecutive samples is a batch of its own."""

    def __init__(self, width, size=12, momentum=0.1):
        super().__init__()
        self.size, self.momentum = size, momentum
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        if not self.training:
            return (x - self.mean) * (self.var + 1e-5).rsqrt() * self.gain + self.shift
        g = x.view(-1, self.size, x.shape[1])
        mean, var = g.mean(1, keepdim=True), g.var(1, unbiased=False, keepdim=True)
        with torch.no_grad():
            stats = torch.stack([mean.mean((0, 1)), var.mean((0, 1))])
            dist.all_reduce(stats)
            stats /= dist.get_world_size()
            self.mean.lerp_(stats[0], self.momentum)
            self.var.lerp_(stats[1], self.momentum)
        return ((g - mean) * (var + 1e-5).rsqrt()).view_as(x) * self.gain + self.shift


def student():
    return nn.Sequential(nn.Linear(64, 48), GhostNorm(48), nn.ReLU(), nn.Linear(48, 32), GhostNorm(32), nn.ReLU(),
                         nn.Linear(32, 10))


def follow(teacher, model, keep):
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), model.parameters()):
            t.mul_(keep).add_(s, alpha=1 - keep)
        for t, s in zip(teacher.buffers(), model.buffers()):
            t.copy_(s)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--labelled", type=int, default=120)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--keep", type=float, default=0.95)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    torch.manual_seed(1)
    net = DDP(student(), broadcast_buffers=False)
    teacher = copy.deepcopy(net.module).eval().requires_grad_(False)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    gen = torch.Generator().manual_seed(2)
    for step in range(args.steps):
        lab = torch.randint(0, args.labelled, (args.batch,), generator=gen).chunk(world)[rank]
        un = torch.randint(args.labelled, 1400, (args.batch,), generator=gen).chunk(world)[rank]
        jitter = (0.2 * torch.randn(args.batch, 64, generator=gen)).chunk(world)[rank]
        weight = min(1.0, step / 20)
        out_lab, out_un = net(torch.cat([x[lab], x[un] + jitter])).chunk(2)
        with torch.no_grad():
            aim = teacher(x[un]).softmax(1)
        loss = F.cross_entropy(out_lab, y[lab]) + weight * F.mse_loss(out_un.softmax(1), aim)
        opt.zero_grad()
        loss.backward()
        opt.step()
        follow(teacher, net.module, min(args.keep, 1 - 1 / (step + 2)))
        if step % 10 == 9:
            hits = (teacher(x[1400:][rank::world]).argmax(1) == y[1400:][rank::world]).sum()
            tally = torch.stack([loss.detach() / world, hits.float()])
            dist.all_reduce(tally)
            if rank == 0:
                print(f"{step + 1} loss {tally[0]:.6f} teacher {int(tally[1])}/{len(x) - 1400}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
