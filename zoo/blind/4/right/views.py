"""Two noisy views of every digit are pulled together against all the others of the batch."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def augment(images, ids, epoch, side):
    out = np.empty((len(ids), 64), dtype=np.float32)
    for row, i in enumerate(ids):
        rng = np.random.default_rng((epoch, side, int(i)))
        im = np.roll(images[i].reshape(8, 8), rng.integers(-1, 2, size=2), axis=(0, 1))
        out[row] = (im * rng.uniform(0.7, 1.3) + rng.normal(0, 0.08, (8, 8))).ravel()
    return torch.from_numpy(out)


def everyone(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.detach())
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def info_nce(a, b, temperature):
    logits = a @ b.t() / temperature
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.proj = nn.Linear(48, 24)

    def forward(self, x):
        return F.normalize(self.proj(self.body(x)), dim=1)


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    torch.manual_seed(0)
    model = DDP(Encoder())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    order = np.random.default_rng(9)
    for epoch in range(args.epochs):
        perm = order.permutation(1200)
        history = []
        for lo in range(0, 1200, args.batch):
            ids = np.array_split(perm[lo:lo + args.batch], world)[rank]
            both = model(torch.cat([augment(images, ids, epoch, 0), augment(images, ids, epoch, 1)]))
            za, zb = both.chunk(2)
            loss = info_nce(everyone(za), everyone(zb), args.temperature)
            opt.zero_grad()
            (loss * world).backward()
            opt.step()
            history.append(loss.item())
        if rank == 0:
            print(f"epoch {epoch} loss {np.mean(history):.6f}", flush=True)
    if rank == 0:
        with torch.no_grad():
            feats = model.module.body(torch.from_numpy(images)).numpy()
        knn = KNeighborsClassifier(5).fit(feats[:1200], labels[:1200])
        print(f"neighbours' accuracy {knn.score(feats[1200:], labels[1200:]):.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--temperature", type=float, default=0.2)
    main(ap.parse_args())
