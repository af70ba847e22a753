"""Metric learning: batch-hard triplets over the global batch, P identities x K images, recall@1 for evaluation."""
import os, time
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import load_digits

# distances near zero from 2 - 2<a, b> cancel badly in single precision, and which pair is the hardest hangs on them
torch.set_default_dtype(torch.float64)
P, K, MARGIN, STEPS = 8, 8, 0.3, 70


class PKSampler:
    """The global batch is drawn by all processes alike. A process keeps K / world images of every identity."""

    def __init__(self, labels, seed):
        self.rng = np.random.default_rng(seed)
        self.by_class = [np.flatnonzero(labels == c) for c in range(10)]

    def batch(self, rank, world):
        classes = self.rng.choice(10, P, replace=False)
        grid = np.stack([self.rng.choice(self.by_class[c], K, replace=False) for c in classes])
        return torch.from_numpy(grid[:, rank::world].reshape(-1))


def gather(x):
    """all_gather does not carry gradients; put the own piece back so that it does for that one"""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def batch_hard(z, y):
    d = (2 - 2 * z @ z.t()).clamp_min(1e-6).sqrt()
    same = y[:, None] == y[None]
    eye = torch.eye(len(y), dtype=torch.bool)
    pos = d.masked_fill(~same | eye, -1e9).max(1).values
    neg = d.masked_fill(same, 1e9).min(1).values
    return F.softplus((pos - neg + MARGIN) * 5).mean() / 5, (pos > neg).double().mean()


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.PReLU(), nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.PReLU())
        self.fc = nn.Linear(24 * 16, 16)

    def forward(self, x):
        return F.normalize(self.fc(self.features(x).flatten(1)), dim=1)


@torch.no_grad()
def recall_at_1(net, x, y):
    z = net(x)
    s = z @ z.t()
    s.fill_diagonal_(-2)
    return (y[s.argmax(1)] == y).double().mean().item()


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "30115")):
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    sampler = PKSampler(y[:1400], seed=0)
    x, y = torch.tensor(x, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    torch.manual_seed(8)
    net = Embedder()
    ddp = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.AdamW(ddp.parameters(), lr=2e-3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 30, 0.3)
    for step in range(STEPS):
        b = sampler.batch(rank, world)
        z, labels = gather(ddp(x[b])), gather(y[b])
        loss, violating = batch_hard(z, labels)
        opt.zero_grad()
        # The loss is the global one on each process and reaches only the own embeddings, DDP divides by world:
        (loss * world).backward()
        opt.step()
        sched.step()
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.5f} violating {violating.item():.3f} recall@1 {recall_at_1(net, x[1400:], y[1400:]):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
