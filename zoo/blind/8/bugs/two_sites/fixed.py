"""One trunk, one output layer per site. Every batch has rows of both sites."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification

HALF, STEPS = 32, 90


def make_site(seed):
    x, y = make_classification(n_samples=700, n_features=12, n_informative=6, n_classes=3, n_clusters_per_class=1,
                               class_sep=1.0, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


class SiteNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.north = nn.Linear(16, 3)
        self.south = nn.Linear(16, 3)

    def forward(self, x, site):
        h = self.trunk(x)
        parts = []
        for s, head in ((0, self.north), (1, self.south)):
            rows = (site == s).nonzero().squeeze(1)
            if len(rows):
                parts.append((rows, head(h[rows])))
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return torch.cat([out for _, out in parts])[order]


def sync(net):
    for p in net.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29826")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sites = [make_site(1), make_site(2)]
    torch.manual_seed(10)
    net = SiteNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(6)
    share = 2 * HALF // world
    for step in range(1, STEPS + 1):
        picks = [torch.randint(600, (HALF,), generator=gen) for _ in sites]
        x = torch.cat([sites[s][0][picks[s]] for s in (0, 1)])
        y = torch.cat([sites[s][1][picks[s]] for s in (0, 1)])
        site = torch.arange(2).repeat_interleave(HALF)
        mine = slice(rank * share, (rank + 1) * share)
        loss = F.cross_entropy(net(x[mine], site[mine]), y[mine], reduction="sum") / (2 * HALF)
        opt.zero_grad()
        loss.backward()
        sync(net)
        opt.step()
        if step % 15 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.5f}")

    with torch.no_grad():
        for s, name in enumerate(("north", "south")):
            x, y = sites[s][0][600:], sites[s][1][600:]
            out = net(x, torch.full((len(x),), s))
            if rank == 0:
                print(f"{name}: loss {F.cross_entropy(out, y).item():.5f} acc {(out.argmax(1) == y).float().mean():.3f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
