"""Pre-train on digits 0-4, save, then fine-tune a new head on digits 5-9."""
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    for key, value in [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "30146")]:
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.add_module(head, nn.Linear(32, 5))
        self.head = head

    def forward(self, x):
        return getattr(self, self.head)(self.body(x))


def fit(model, x, y, steps, lr, seed, tag):
    rank, world = dist.get_rank(), dist.get_world_size()
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    gen = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = torch.randint(len(x), (64,), generator=gen)[rank::world]
        opt.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    if rank == 0:
        print(f"{tag}: loss {loss:.5f}")


def wrap(net):
    return DDP(net) if dist.get_world_size() > 1 else net


def main():
    setup()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    low = y < 5

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = Path(folder[0]) / "base.pt"

    torch.manual_seed(1)
    net = Net("low")
    model = wrap(net)
    fit(model, x[low], y[low], 60, 0.1, 10, "digits 0-4")
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict()}, path)
    dist.barrier()

    torch.manual_seed(2)
    net = Net("high")
    # the head is new, so not all keys match
    net.load_state_dict(torch.load(path)["model"], strict=False)
    net.body.requires_grad_(False)
    model = wrap(net)
    fit(model, x[~low], y[~low] - 5, 60, 0.2, 11, "digits 5-9")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
