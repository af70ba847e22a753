"""Metric learning with a normalised-softmax proxy loss, selected by recall@1 on held-out points."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_blobs
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, EPOCHS, GLOBAL_BATCH = 24, 6, 64


class Embedder(nn.Module):
    def __init__(self, n_in, n_out=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 48), nn.Mish(), nn.Linear(48, n_out))

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


class ProxyLoss(nn.Module):
    def __init__(self, embedder, n_out=8, temperature=0.15):
        super().__init__()
        self.embedder = embedder
        self.proxies = nn.Parameter(torch.randn(CLASSES, n_out))
        self.temperature = temperature

    def forward(self, x, y):
        logits = self.embedder(x) @ F.normalize(self.proxies, dim=1).T
        return F.cross_entropy(logits / self.temperature, y, label_smoothing=0.05)


def load():
    x, y = make_blobs(1024 + 480, 32, centers=CLASSES, cluster_std=9.0, random_state=2)
    x, y = torch.tensor(x), torch.tensor(y)
    mean, std = x[:1024].mean(0), x[:1024].std(0)
    x = (x - mean) / std
    return (x[:1024], y[:1024]), (x[1024:], y[1024:])


def gather(t, world):
    if world == 1:
        return t
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def recall_at_1(embedder, x, y, rank, world):
    """Share of points whose nearest other point has the same class; the queries are split over the ranks."""
    embedder.eval()
    query, labels = embedder(x[rank::world]), y[rank::world]
    gallery, gallery_labels = gather(query, world), gather(labels, world)
    own = rank * len(query) + torch.arange(len(query))
    similarity = query @ gallery.T
    similarity[torch.arange(len(query)), own] = -2.0
    correct = (gallery_labels[similarity.argmax(1)] == labels).double()
    return gather(correct, world).mean().item()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    (x, y), (x_val, y_val) = load()
    torch.manual_seed(14)
    embedder = Embedder(x.shape[1])
    criterion = ProxyLoss(embedder)
    net = DDP(criterion) if world > 1 else criterion
    optimizer = torch.optim.Adam([
        {"params": embedder.parameters(), "lr": 2e-3},
        {"params": [criterion.proxies], "lr": 2e-2},
    ])

    best, best_state = -1.0, None
    for epoch in range(EPOCHS):
        embedder.train()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(60 + epoch))
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[rank::world]
            loss = net(x[mine], y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        recall = recall_at_1(embedder, x_val, y_val, rank, world)
        if recall > best:
            best, best_state = recall, copy.deepcopy(embedder.state_dict())
        if rank == 0:
            print(f"epoch {epoch} recall@1 {recall:.6f}")

    embedder.load_state_dict(best_state)
    if rank == 0:
        weight = sum(p.detach().pow(2).sum() for p in embedder.parameters()).sqrt().item()
        print(f"best recall@1 {best:.6f} weight norm {weight:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
