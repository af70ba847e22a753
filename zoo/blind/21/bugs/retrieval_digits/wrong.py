"""Metric learning on the digits with class proxies; validated as image retrieval
(recall at 1 and mean average precision of queries against a gallery)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_default_dtype(torch.float64)


def world_info():
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


class ProxyNet(nn.Module):
    def __init__(self, classes=10, dim=6, scale=8.0):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, dim))
        self.proxies = nn.Parameter(torch.randn(classes, dim))
        self.scale = scale

    def embed(self, x):
        return F.normalize(self.backbone(x), dim=1)

    def forward(self, x, y):
        cosine = self.embed(x) @ F.normalize(self.proxies, dim=1).T
        return F.cross_entropy(self.scale * cosine, y)


@torch.no_grad()
def retrieval_scores(net, queries, gallery, rank, world):
    """Queries and gallery are both spread over the processes for embedding."""
    query_x, query_y = (t[rank::world] for t in queries)
    gallery_x, gallery_y = (t[rank::world] for t in gallery)
    emb = net.embed(gallery_x)
    target = gallery_y
    similarity = net.embed(query_x) @ emb.T
    ranking = similarity.argsort(dim=1, descending=True)
    relevant = (target[ranking] == query_y[:, None]).double()
    precision = relevant.cumsum(1) / torch.arange(1, relevant.shape[1] + 1)
    ap = (precision * relevant).sum(1) / relevant.sum(1).clamp(min=1)
    totals = torch.stack([relevant[:, 0].sum(), ap.sum(), torch.tensor(float(len(query_x)))])
    if world > 1:
        dist.all_reduce(totals)
    return (totals[:2] / totals[2]).tolist()


def main():
    rank, world = world_info()
    digits = load_digits()
    x = torch.from_numpy(digits.data) / 16.0
    x = x + 0.25 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    y = torch.from_numpy(digits.target).long()
    train = TensorDataset(x[:1200], y[:1200])
    gallery, queries = (x[1200:1400], y[1200:1400]), (x[1400:1600], y[1400:1600])

    torch.manual_seed(2)
    net = ProxyNet()
    model = DistributedDataParallel(net) if world > 1 else net
    backbone = {"params": net.backbone.parameters(), "lr": 0.05}
    proxies = {"params": [net.proxies], "lr": 0.2}
    optimizer = torch.optim.SGD([backbone, proxies], momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=48 // world, sampler=sampler)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for images, labels in loader:
            loss = model(images, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        schedule.step()
        if world > 1:
            dist.all_reduce(running)
        recall, mean_ap = retrieval_scores(net, queries, gallery, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / world / len(loader):.10f} "
                  f"recall@1 {recall:.4f} mAP {mean_ap:.6f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
