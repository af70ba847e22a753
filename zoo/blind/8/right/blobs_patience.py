import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_blobs
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x):
        return self.layers((x - self.mean) / self.std)


class Loop:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = make_blobs(1000, n_features=6, centers=5, cluster_std=5.0, random_state=3)
        x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
        self.train, self.val = (x[:640], y[:640]), (x[640:], y[640:])
        torch.manual_seed(30)
        self.model = DDP(Net(x[:640].mean(0), x[:640].std(0)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def epoch(self, number, batch=64):
        x, y = self.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        for rows in order.split(batch):
            rows = rows[self.rank::self.world]
            loss = F.cross_entropy(self.model(x[rows]), y[rows])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        logits = self.model.module(self.val[0])
        self.model.train()
        return F.cross_entropy(logits, self.val[1]).item(), (logits.argmax(1) == self.val[1]).float().mean().item()

    def fit(self, epochs=20, patience=3):
        best, bad = float("inf"), 0
        for number in range(epochs):
            self.epoch(number)
            stop = torch.zeros(1)
            if self.rank == 0:
                loss, acc = self.validate()
                print(f"epoch {number} val loss {loss:.5f} acc {acc:.4f}")
                if loss < best - 1e-3:
                    best, bad = loss, 0
                    torch.save(self.model.module.state_dict(), "blobs_best.pt")
                else:
                    bad += 1
                stop.fill_(float(bad >= patience))
            dist.broadcast(stop, src=0)
            if stop.item():
                break
        if self.rank == 0:
            self.model.module.load_state_dict(torch.load("blobs_best.pt"))
            print(f"ended after epoch {number}, best val loss {self.validate()[0]:.5f}")


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29846")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Loop().fit()
    time.sleep(0.3)
    dist.destroy_process_group()
