"""Card fraud: rare positives, weighted sampling with replacement, focal loss.

DDP with a DistributedWeightedSampler as people write it (torch has none). The features
are standardised with statistics of the whole training set, summed over the processes'
parts. Test scores are collected with their row numbers, as the test sampler pads.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, rank, world, seed=0):
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        self.num_samples, self.rank, self.world, self.seed, self.epoch = num_samples, rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.num_samples, replacement=True, generator=g)
        return iter(drawn[self.rank:self.num_samples:self.world].tolist())


class Payments(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.y = (rng.random(n) < 0.04).astype(np.float32)
        x = rng.normal(size=(n, 12)) * np.linspace(0.2, 40, 12) + np.linspace(-5, 90, 12)
        x[:, 3] += self.y * 25
        x[:, 7] += self.y * rng.choice([-70.0, 70.0], n)
        self.x = x.astype(np.float32)

    def standardise(self, mean, std):
        self.x = ((self.x - mean) / std).astype(np.float32)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def statistics(x, rank, world):
    """Mean and deviation of all rows; each process reads a contiguous part."""
    part = torch.from_numpy(np.array_split(x, world)[rank]).double()
    sums = torch.cat([torch.tensor([float(len(part))], dtype=torch.float64), part.sum(0), part.square().sum(0)])
    dist.all_reduce(sums)
    mean, square = sums[1:].chunk(2)
    mean, square = mean / sums[0], square / sums[0]
    return mean.numpy(), (square - mean ** 2).sqrt().numpy()


def focal(logits, y, gamma=2.0):
    p = torch.where(y > 0.5, logits, -logits).sigmoid()
    return ((1 - p) ** gamma * F.binary_cross_entropy_with_logits(logits, y, reduction="none")).mean()


def test_scores(net, data, batch):
    loader = DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))
    net.eval()
    with torch.no_grad():
        own = {int(i): float(s) for rows, x, _ in loader for i, s in zip(rows, net(x)[:, 0])}
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    merged = {}
    for part in everybody:
        merged.update(part)                 # rows repeated by the sampler fall together here
    net.train()
    return np.array([merged[i] for i in range(len(data))])


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29617")
    dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)))
    rank, world = dist.get_rank(), dist.get_world_size()
    np.random.seed(rank)
    torch.manual_seed(rank)

    train, test = Payments(4003, 1), Payments(1501, 2)
    mean, std = statistics(train.x, rank, world)
    train.standardise(mean, std), test.standardise(mean, std)
    share = train.y.mean()
    sampler = DistributedWeightedSampler(np.where(train.y > 0.5, 0.3 / share, 0.7 / (1 - share)), 1024, rank, world, seed=77)
    loader = DataLoader(train, batch_size=128 // world, sampler=sampler)

    net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 24), nn.SiLU(), nn.Linear(24, 1))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        loss_sum, positives = 0.0, 0.0
        for _, x, y in loader:
            optimizer.zero_grad()
            loss = focal(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() / len(loader)
            positives += y.sum().item()
        schedule.step()
        scores = test_scores(net, test, 200)
        log = torch.tensor([loss_sum / world, positives], dtype=torch.float64)
        dist.all_reduce(log)
        if rank == 0:
            print(f"epoch {epoch}: loss {log[0]:.5f}, positives {int(log[1])}, AUC {roc_auc_score(test.y, scores):.4f}, "
                  f"average precision {average_precision_score(test.y, scores):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
