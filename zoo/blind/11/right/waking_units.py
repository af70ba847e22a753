"""Units of a ReLU layer which are nearly always silent are born again every 25 steps."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29837")


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.into = nn.Linear(13, width)
        self.out = nn.Linear(width, 3)
        nn.init.constant_(self.into.bias, -1.2)
        self.register_buffer("active", torch.zeros(width))

    def forward(self, x):
        h = F.relu(self.into(x))
        self.active += (h.detach() > 0).sum(0)
        return self.out(h)

    @torch.no_grad()
    def wake(self, opt, seen, seed):
        total = self.active.clone()
        dist.all_reduce(total)
        sleepy = total / seen < 0.05
        fresh = torch.empty_like(self.into.weight)
        nn.init.kaiming_uniform_(fresh, generator=torch.Generator().manual_seed(seed))
        self.into.weight[sleepy] = fresh[sleepy]
        self.into.bias[sleepy] = 0.0
        self.out.weight[:, sleepy] = 0.0
        for p in (self.into.weight, self.into.bias):
            for value in opt.state[p].values():
                if value.shape == p.shape:
                    value[sleepy] = 0.0
        self.active.zero_()
        return int(sleepy.sum())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    torch.manual_seed(rank)
    net = Net()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-5)
    pick = torch.Generator().manual_seed(61)
    for step in range(1, 101):
        mine = torch.randperm(len(x), generator=pick)[:60][rank::world]
        loss = F.cross_entropy(net(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        opt.step()
        if step % 25 == 0:
            woken = net.wake(opt, seen=60 * 25, seed=step)
            with torch.no_grad():
                whole = F.cross_entropy(net(x), y)
            net.active.zero_()
            if rank == 0:
                print(f"step {step}: {woken} units woken, loss {whole.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
