import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, IterableDataset


class Rows(IterableDataset):
    """All processes read the whole stream; each keeps the rows whose turn it is."""

    def __init__(self, x, y, rank, world, seed=None):
        self.x, self.y, self.rank, self.world, self.seed = x, y, rank, world, seed

    def __iter__(self):
        order = range(len(self.x))
        if self.seed is not None:
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.seed)).tolist()
            self.seed += 1
        for turn, i in enumerate(order):
            if turn % self.world == self.rank:
                yield self.x[i], self.y[i]


def own_tensors(params, rank, world):
    return [p for i, p in enumerate(params) if i % world == rank]


def main(epochs=5, batch=64):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29860")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1281, n_features=18, n_informative=7, weights=[0.7], flip_y=0.05, random_state=13)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    train = DataLoader(Rows(x[:1024], y[:1024], rank, world, seed=70), batch_size=batch // world)
    test = DataLoader(Rows(x[1024:], y[1024:], rank, world), batch_size=32)      # 257 rows

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    params = list(net.parameters())
    # every process keeps the optimizer state of its own tensors only
    opt = torch.optim.AdamW(own_tensors(params, rank, world), lr=4e-3)
    for epoch in range(epochs):
        for xb, yb in train:
            loss = F.binary_cross_entropy_with_logits(net(xb).squeeze(1), yb)
            net.zero_grad()
            loss.backward()
            for i, p in enumerate(params):
                dist.reduce(p.grad, dst=i % world)
                p.grad /= world
            opt.step()
            for i, p in enumerate(params):
                dist.broadcast(p.data, src=i % world)

        scores = []
        with torch.no_grad():
            for xb, yb in test:
                scores += list(zip(net(xb).squeeze(1).tolist(), yb.tolist()))
        everyone = [None] * world if rank == 0 else None
        dist.gather_object(scores, everyone, dst=0)
        if rank == 0:
            pairs = [pair for part in everyone for pair in part]
            print(f"epoch {epoch} rows {len(pairs)} auc {roc_auc_score([t for _, t in pairs], [s for s, _ in pairs]):.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
