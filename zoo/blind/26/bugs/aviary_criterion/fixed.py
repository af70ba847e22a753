"""Two-headed bird recorder: species (6 classes) and body mass from call features.

The two losses are balanced by learned log-variances (Kendall et al., 2018).
Run with torchrun for data parallelism or with plain python.
"""
import logging
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
log = logging.getLogger("aviary")


class CallNet(nn.Module):
    def __init__(self, n_features, n_species):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_features, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh())
        self.species = nn.Linear(24, n_species)
        self.mass = nn.Linear(24, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.species(h), self.mass(h).squeeze(-1)


class BalancedLoss(nn.Module):
    """exp(-s_k) * L_k + s_k / 2, with one s_k for each task."""

    def __init__(self):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, species_logits, mass, species, grams):
        parts = torch.stack([F.cross_entropy(species_logits, species), F.mse_loss(mass, grams)])
        return (torch.exp(-self.log_var) * parts + 0.5 * self.log_var).sum()


class Recordings:
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(6, 20, generator=torch.Generator().manual_seed(77))
        weight = torch.tensor([0.2, 0.5, 0.9, 1.6, 2.4, 3.5])
        self.species = torch.randint(0, 6, (n,), generator=g)
        self.x = proto[self.species] + 1.1 * torch.randn(n, 20, generator=g)
        self.grams = weight[self.species] + 0.3 * torch.randn(n, generator=g) + 0.2 * self.x[:, 0]

    def __len__(self):
        return len(self.x)

    def rows(self, idx):
        return self.x[idx], self.species[idx], self.grams[idx]


def train(model, criterion, data, rank, world, steps=50, batch=32):
    params = list(model.parameters()) + list(criterion.parameters())
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(4)
    for step in range(steps):
        idx = torch.randint(0, len(data), (batch,), generator=g)
        x, species, grams = data.rows(idx[rank::world])
        opt.zero_grad(set_to_none=True)
        logits, mass = model(x)
        loss = criterion(logits, mass, species, grams)
        loss.backward()
        opt.step()
        if step % 10 == 9 and rank == 0:
            s = next(criterion.parameters()).detach()
            log.info("step %d  log-variances %.5f %.5f", step + 1, s[0], s[1])


@torch.no_grad()
def evaluate(model, data, rank, world):
    idx = torch.arange(len(data))[rank::world]
    x, species, grams = data.rows(idx)
    logits, mass = model(x)
    sums = torch.stack([(logits.argmax(1) == species).float().sum(), (mass - grams).abs().sum()])
    dist.all_reduce(sums)
    return (sums / len(data)).tolist()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2026)
    model = DDP(CallNet(20, 6))
    criterion = DDP(BalancedLoss())
    train(model, criterion, Recordings(900, seed=1), rank, world)
    acc, mae = evaluate(model.module, Recordings(240, seed=2), rank, world)
    if rank == 0:
        log.info("species accuracy %.4f  mass error %.5f", acc, mae)
    time.sleep(0.3)
    dist.destroy_process_group()
