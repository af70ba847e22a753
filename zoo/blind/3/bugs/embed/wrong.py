"""Digit embeddings trained with a normalised softmax head, scored by nearest-neighbour retrieval (recall@1)."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Embedder(nn.Module):
    def __init__(self, dim=16, classes=10, temperature=0.2):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GELU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(16 * 16, dim),
        )
        self.proxies = nn.Parameter(torch.randn(classes, dim))
        self.temperature = temperature

    def embed(self, x):
        return F.normalize(self.trunk(x), dim=1)

    def forward(self, x):
        return self.embed(x) @ F.normalize(self.proxies, dim=1).t() / self.temperature


def get_data(rank, world, batch_size):
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    y = torch.tensor(bunch.target)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(99))
    everything = TensorDataset(x, y)
    train = Subset(everything, perm[:1200].tolist())
    test = Subset(everything, perm[1200:1500].tolist())
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=1)
    train_loader = DataLoader(train, batch_size // world, sampler=sampler)
    mine = Subset(test, range(rank, len(test), world))
    test_loader = DataLoader(mine, 64)
    return sampler, train_loader, test_loader


@torch.no_grad()
def recall_at_1(model, loader):
    model.eval()
    feats, labels = [], []
    for x, y in loader:
        feats.append(model.embed(x))
        labels.append(y)
    feats, labels = torch.cat(feats), torch.cat(labels)
    sim = feats @ feats.t()
    sim.fill_diagonal_(-1.0)
    hits = (labels[sim.argmax(1)] == labels).sum()
    counts = torch.stack([hits, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=80)
    ap.add_argument("--lr", type=float, default=0.002)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    sampler, train_loader, test_loader = get_data(rank, world, args.batch_size)
    ddp = DistributedDataParallel(Embedder())
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        running = torch.zeros(())
        for x, y in train_loader:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        r1 = recall_at_1(ddp.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}  loss {running.item() / world / len(train_loader):.4f}  recall@1 {100 * r1:.2f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
