"""DeepCluster on the digits: cluster the features of all pictures, learn the cluster numbers, and again.

Each round: every process computes the features of its own pictures, process 0 gathers them and runs k-means, the
cluster numbers are handed out; a new head is drawn and network and head are trained on the numbers for one epoch.
"""
import os
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.metrics import normalized_mutual_info_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLUSTERS, ROUNDS, BATCH, PICTURES = 15, 4, 128, 1536
warnings.filterwarnings("ignore")


class Pictures(Dataset):
    def __init__(self, images):
        self.images, self.labels, self.round = images, None, 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        rng = np.random.default_rng([self.round, i])
        image = np.roll(self.images[i], rng.integers(-1, 2, size=2), (0, 1))
        return torch.tensor(image, dtype=torch.float32), int(self.labels[i])


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(256, 32)

    def forward(self, x):
        return self.fc(F.leaky_relu(self.conv(x[:, None]), 0.1).flatten(1))


@torch.no_grad()
def assign(trunk, images, rank, world, k):
    """Cluster numbers of all pictures, the same on every process."""
    mine = torch.arange(rank, len(images), world)
    features = F.normalize(trunk(images[mine]), dim=1).double().numpy()
    parts = [None] * world if rank == 0 else None
    dist.gather_object((mine.numpy(), features), parts)
    numbers = torch.zeros(len(images), dtype=torch.long)
    if rank == 0:
        rows = np.concatenate([p[0] for p in parts])
        table = np.empty((len(images), features.shape[1]))
        table[rows] = np.concatenate([p[1] for p in parts])
        numbers.copy_(torch.tensor(KMeans(k, n_init=1, max_iter=20, random_state=0).fit(table).labels_))
    dist.broadcast(numbers, 0)
    return numbers


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29618")
    dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)))
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = digits.images[:PICTURES] / 8 - 1
    plain = torch.tensor(images, dtype=torch.float32)
    data = Pictures(images)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, BATCH // world, sampler=sampler)

    torch.manual_seed(3)
    trunk = Trunk()
    for number in range(ROUNDS):
        data.labels, data.round = assign(trunk, plain, rank, world, CLUSTERS), number
        sampler.set_epoch(number)
        torch.manual_seed(1000 * number + rank)                # heads differ until DDP hands out the one of process 0
        model = DDP(nn.Sequential(trunk, nn.Linear(32, CLUSTERS)))
        counts = torch.bincount(data.labels, minlength=CLUSTERS).float()
        weight = (counts.mean() / counts.clamp(min=1)).sqrt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=1e-4)
        total = torch.zeros(())
        for x, y in loader:
            loss = (F.cross_entropy(model(x), y, reduction="none") * weight[y]).mean()      # not by the sum of weights
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        if rank == 0:
            nmi = normalized_mutual_info_score(digits.target[:PICTURES], data.labels)
            print(f"round {number} loss {total.item() / world:.4f} agreement with the classes {nmi:.4f} "
                  f"largest cluster {int(counts.max())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
