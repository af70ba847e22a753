"""Fine-tuning with frozen batch norm; process 0 alone tests and decides when to stop."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LIMIT, PATIENCE = 64, 160, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(128, 32)
        self.bn1 = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc2(F.relu(self.bn1(self.fc1(x.flatten(1)))))

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.eval()
        return self


def calibrate(net, x):
    """One pass over fixed rows sets the statistics; they stay as they are from here on."""
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.train()
            m.momentum = None
    with torch.no_grad():
        net(x[:512])
    net.train()


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29817")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    train, held = slice(0, 1400), slice(1400, None)
    torch.manual_seed(5)
    net = Net()
    calibrate(net, x)
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    best, bad = float("inf"), 0
    for step in range(1, LIMIT + 1):
        rows = torch.randint(1400, (BATCH,), generator=g)[rank::world]
        loss = F.cross_entropy(model(x[train][rows]), y[train][rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            stop = torch.zeros(1, dtype=torch.int32)
            if rank == 0:
                with torch.no_grad():
                    score = F.cross_entropy(net(x[held]), y[held]).item()
                best, bad = (score, 0) if score < best else (best, bad + 1)
                print(f"step {step}: held out {score:.4f}", flush=True)
                stop += bad >= PATIENCE
            dist.broadcast(stop, 0)
            if stop.item():
                break
    if rank == 0:
        print(f"stopped at {step}, best {best:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
