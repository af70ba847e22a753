"""A tiny model on little data: every process trains the same net on all rows, only the long test is shared out."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman2

STEPS, BATCH = 150, 32


def env():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29803")


def dataset(count, seed):
    x, y = make_friedman2(count, noise=5.0, random_state=seed)
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    x = x / torch.tensor([100.0, 1700.0, 1.0, 10.0])
    return x, (y / 500).unsqueeze(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


@torch.no_grad()
def shared_test(net, rank, world):
    """Test rows are made in blocks of 500; block b is done by process b % world."""
    net.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for block in range(rank, 10, world):
        x, y = dataset(500, seed=1000 + block)
        total += torch.tensor([(net(x) - y).double().square().sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(total)
    net.train()
    return (total[0] / total[1]).item()


def main():
    env()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    x, y = dataset(600, seed=0)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,))
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            error = shared_test(net, rank, world)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.5f}, test {error:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
