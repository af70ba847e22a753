"""Two towers: match the upper half of a digit with its lower half. Triplet loss, recall@k on held-out digits."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Halves(Dataset):
    def __init__(self, images, seed=0):
        self.top = images[:, :4].flatten(1)
        self.bottom = images[:, 4:].flatten(1)
        g = torch.Generator().manual_seed(seed)
        n = len(images)
        self.negative = (torch.arange(n) + torch.randint(1, n, (n,), generator=g)) % n

    def __len__(self):
        return len(self.top)

    def __getitem__(self, i):
        return self.top[i], self.bottom[i], self.bottom[self.negative[i]]


def tower():
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 24))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.doc = tower(), tower()

    def forward(self, top, bottom):
        return F.normalize(self.query(top), dim=1), F.normalize(self.doc(bottom), dim=1)


@torch.no_grad()
def evaluate(model, data, rank, world, ks=(1, 5)):
    model.eval()
    q, d = model(data.top[rank::world], data.bottom[rank::world])
    model.train()
    parts = [torch.empty_like(d) for _ in range(world)]
    dist.all_gather(parts, d)
    order = (q @ torch.cat(parts).T).argsort(dim=1, descending=True)
    gold = torch.arange(len(q)).unsqueeze(1) + rank * len(q)
    hits = torch.tensor([(order[:, :k] == gold).any(1).sum().item() for k in ks] + [len(q)], dtype=torch.float64)
    dist.all_reduce(hits)
    return {f"recall@{k}": (hits[j] / hits[-1]).item() for j, k in enumerate(ks)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=96)
    p.add_argument("--margin", type=float, default=0.4)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    train, test = Halves(images[:1152]), Halves(images[1152:1552])
    sampler = DistributedSampler(train, shuffle=True, seed=2)
    loader = DataLoader(train, batch_size=args.batch_size // world, sampler=sampler)
    model = DDP(TwoTowers())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-6)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for top, bottom, other in loader:
            # one forward pass for the positives and the negatives
            q, d = model(torch.cat([top, top]), torch.cat([bottom, other]))
            n = len(top)
            pos = (q[:n] * d[:n]).sum(1)
            neg = (q[n:] * d[n:]).sum(1)
            loss = F.softplus(8 * (args.margin - pos + neg)).mean() / 8
            opt.zero_grad()
            loss.backward()
            opt.step()
        scores = evaluate(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} " + " ".join(f"{k} {v:.4f}" for k, v in scores.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
