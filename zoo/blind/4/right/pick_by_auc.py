"""Tumour screening: area under the curve after every epoch decides which weights are kept."""
import argparse
import io
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Cells(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def load():
    x, y = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    perm = torch.randperm(len(y), generator=torch.Generator().manual_seed(6))
    x, y = x[perm], y[perm]
    x = (x - x[:400].mean(0)) / x[:400].std(0)
    x = x + 1.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    return Cells(x[:400], y[:400]), Cells(x[400:], y[400:])


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    ids, scores, truth = [], [], []
    for i, x, y in loader:
        ids.append(i)
        scores.append(model.module(x).squeeze(1))
        truth.append(y)
    model.train()
    packed = torch.stack([torch.cat(ids).double(), torch.cat(scores).double(), torch.cat(truth).double()])
    everyone = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, packed)
    table = {int(i): (s, t) for part in everyone for i, s, t in part.t().tolist()}
    s, t = zip(*(table[i] for i in sorted(table)))
    return roc_auc_score(t, s), len(table)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = load()
    test_loader = DataLoader(test, batch_size=32, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(20)
    model = DDP(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 1)))
    opt = torch.optim.RMSprop(model.parameters(), lr=args.lr * 0.3)
    best, kept = -1.0, None
    for epoch in range(args.epochs):
        sampler = DistributedSampler(train, seed=1000 + epoch)
        for _, x, y in DataLoader(train, batch_size=args.batch // world, sampler=sampler):
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        auc, n = evaluate(model, test_loader)
        if auc > best:
            best, kept = auc, io.BytesIO()
            torch.save(model.module.state_dict(), kept)
        if rank == 0:
            print(f"epoch {epoch} area {auc:.6f} over {n} patients, best {best:.6f}", flush=True)
    kept.seek(0)
    model.module.load_state_dict(torch.load(kept))
    auc, _ = evaluate(model, test_loader)
    if rank == 0:
        print(f"kept weights: {auc:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
