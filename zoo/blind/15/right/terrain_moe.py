"""Switch-style mixture of experts (all experts on every process) for heights of a patched terrain.

Router: top-1 with the balance loss of the Switch paper and a z-loss. The balance loss multiplies the share of points
sent to an expert (a count over the whole batch, no gradient) by the expert's mean probability.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS, BATCH, EPOCHS = 6, 64, 4


def terrain(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=g) * 4 - 2
    patch = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0.3).long()
    slope = torch.tensor([[1.0, 2.0], [-2.0, 0.5], [0.3, -1.5], [2.0, 2.0]])[patch]
    height = (slope * x).sum(1) + 0.5 * patch + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(x, height)


class SwitchLayer(nn.Module):
    def __init__(self, width, distributed):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(EXPERTS))
        self.register_buffer("seen", torch.zeros(EXPERTS))            # of this process, for the log
        self.distributed = distributed

    def forward(self, x):
        logits = self.router(x)
        probs = logits.softmax(1)
        weight, chosen = probs.max(1)
        count = torch.bincount(chosen, minlength=EXPERTS).float()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):                     # an expert without points still gets (zero) gradients
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        if self.training:
            self.seen += count
            total = torch.cat([count, torch.tensor([float(len(x))])])
            if self.distributed:
                dist.all_reduce(total)
            share = total[:-1] / total[-1]
            balance = EXPERTS * (share * probs.mean(0)).sum()
            zloss = logits.logsumexp(1).square().mean()
            return x + out, 0.02 * balance + 1e-3 * zloss
        return x + out, 0.0


class Model(nn.Module):
    def __init__(self, distributed, width=16):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.switch = SwitchLayer(width, distributed)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x, extra = self.switch(torch.tanh(self.inp(x)))
        return self.out(x)[:, 0], extra


def main():
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(40 + rank)
    train, test = terrain(640, 1), terrain(203, 2)
    sampler = DistributedSampler(train, world, rank, seed=0)
    loader = DataLoader(train, BATCH // world, sampler=sampler)
    net = Model(world > 1)
    model = DDP(net, forward_sync_buffers=False) if world > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        net.train()
        sums = torch.zeros(4, dtype=torch.float64)
        for x, y in loader:
            predicted, extra = model(x)
            loss = F.smooth_l1_loss(predicted, y)
            optimizer.zero_grad()
            (loss + extra).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()
            sums[0] += loss.item() / len(loader) / world
            sums[1] += extra.item() / len(loader) / world
        net.eval()
        x, y = (t[rank::world] for t in test.tensors)
        with torch.no_grad():
            sums[2] = (net(x)[0] - y).square().sum().double()
        sums[3] = len(x)
        seen = net.switch.seen.clone()
        if world > 1:
            dist.all_reduce(sums)
            dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0]:.4f} router {sums[1]:.4f} test {(sums[2] / sums[3]).sqrt():.4f} seen {seen.int().tolist()}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
