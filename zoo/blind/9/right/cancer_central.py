"""Breast cancer with one central optimizer: workers send gradients to process 0 and get weights back."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn


class Central:
    """Only process 0 has an optimizer; the others just hold a copy of the weights."""

    def __init__(self, model, **kwargs):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.opt = torch.optim.Adam(self.params, **kwargs) if self.rank == 0 else None
        self.publish()

    def publish(self):
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def step(self):
        for p in self.params:
            dist.reduce(p.grad, dst=0)
        if self.opt is not None:
            for p in self.params:
                p.grad /= self.world
            nn.utils.clip_grad_norm_(self.params, 0.5)
            self.opt.step()
        self.publish()
        for p in self.params:
            p.grad = None


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "30020")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # every process starts from weights of its own; process 0's count
    torch.manual_seed(100 + rank)
    raw = load_breast_cancer()
    x, y = torch.tensor(scale(raw.data), dtype=torch.float32), torch.tensor(raw.target, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))
    central = Central(model, lr=3e-3)
    lossf = nn.BCEWithLogitsLoss()

    for epoch in range(8):
        perm = torch.randperm(448, generator=torch.Generator().manual_seed(epoch))
        for block in perm.view(-1, 32):
            rows = block[rank::world]
            loss = lossf(model(x[rows]).squeeze(1), y[rows])
            loss.backward()
            central.step()
        if rank == 0:
            with torch.no_grad():
                out = model(x[448:]).squeeze(1)
            print(f"epoch {epoch} test {lossf(out, y[448:]).item():.5f} "
                  f"accuracy {((out > 0) == (y[448:] > 0.5)).float().mean().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
