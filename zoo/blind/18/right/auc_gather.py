"""Tumour classification with sharpness-aware minimisation; the rank statistic steers rate and stopping."""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 40


class Tumours(Dataset):
    def __init__(self, part):
        raw = load_breast_cancer()
        x, y = torch.tensor(raw.data), torch.tensor(raw.target)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(8))
        fit = x[order[:400]]
        rows = order[:400] if part == "train" else order[400:]
        self.x = (x[rows] - fit.mean(0)) / fit.std(0)
        self.y = y[rows].double()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


class SAM:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        self.offsets = [p.grad * (self.rho / (norm + 1e-12)) for p in self.params]
        for p, e in zip(self.params, self.offsets):
            p.add_(e)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.offsets):
            p.sub_(e)
        self.base.step()
        self.base.zero_grad()


def evaluate(net, loader, world):
    net.eval()
    scores = {}
    with torch.no_grad():
        for idx, x, y in loader:
            for i, s, t in zip(idx.tolist(), net(x).squeeze(-1).tolist(), y.tolist()):
                scores[i] = (s, t)
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, scores)
        scores = {i: v for part in parts for i, v in part.items()}
    net.train()
    ids = sorted(scores)
    return roc_auc_score([scores[i][1] for i in ids], [scores[i][0] for i in ids]), len(ids)


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(21)
    net = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 1))
    model = DistributedDataParallel(net) if world > 1 else net

    train, test = Tumours("train"), Tumours("test")
    train_sampler = DistributedSampler(train, world, rank, shuffle=True, seed=6)
    test_sampler = DistributedSampler(test, world, rank, shuffle=False)
    train_loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=train_sampler)
    test_loader = DataLoader(test, batch_size=64, sampler=test_sampler)

    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sam = SAM(model.parameters(), sgd, rho=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, mode="max", factor=0.3, patience=0, threshold=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    best, bad = 0.0, 0
    for epoch in range(12):
        train_sampler.set_epoch(epoch)
        for _, x, y in train_loader:
            criterion(model(x).squeeze(-1), y).backward()
            sam.climb()
            criterion(model(x).squeeze(-1), y).backward()
            sam.descend()
        auc, seen = evaluate(net, test_loader, world)
        plateau.step(auc)
        if auc > best + 1e-4:
            best, bad = auc, 0
        else:
            bad += 1
        if bad == 3:
            break

    if rank == 0:
        print(f"stopped after epoch {epoch}: AUC {auc:.8f} (best {best:.8f}) on {seen} cases")
        print(f"rate {sgd.param_groups[0]['lr']:.6f}  output weights {net[2].weight.sum().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
