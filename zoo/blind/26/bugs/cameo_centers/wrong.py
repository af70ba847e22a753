"""Wine cultivars with softmax + center loss (Wen et al., 2016); prediction by nearest centre."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP


class CameoNet(nn.Module):
    def __init__(self, n_in, n_class, dim=8, rate=0.3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 32), nn.ReLU(), nn.Linear(32, dim))
        self.classify = nn.Linear(dim, n_class)
        self.register_buffer("centers", torch.zeros(n_class, dim))
        self.rate = rate

    def forward(self, x):
        feat = self.body(x)
        return feat, self.classify(feat)

    @torch.no_grad()
    def move_centers(self, feat, y):
        hot = F.one_hot(y, len(self.centers)).to(feat.dtype)
        count = hot.sum(0)
        total = hot.T @ feat
        shift = (total - count[:, None] * self.centers) / (1 + count[:, None])
        self.centers += self.rate * shift

    def nearest(self, x):
        return torch.cdist(self.body(x), self.centers).argmin(1)


def wine():
    data = load_wine()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    x = x + 0.6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(12))
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(13))
    return x[order[:128]], y[order[:128]], x[order[128:]], y[order[128:]]


def epochs(n, count, batch, seed):
    g = torch.Generator().manual_seed(seed)
    for e in range(count):
        order = torch.randperm(n, generator=g)
        for start in range(0, n, batch):
            yield e, order[start:start + batch]


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29671")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(55)
    x, y, x_test, y_test = wine()
    model = DDP(CameoNet(x.shape[1], 3))
    net = model.module
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    totals, last = torch.zeros(2), 0
    for epoch, batch in epochs(len(x), count=10, batch=32, seed=56):
        if epoch != last:
            dist.all_reduce(totals)
            if rank == 0 and epoch % 3 == 0:
                print(f"epoch {epoch}: softmax {totals[0]:.5f} centre {totals[1]:.5f}")
            totals, last = torch.zeros(2), epoch
        rows = batch[rank::world]
        feat, logits = model(x[rows])
        ce = F.cross_entropy(logits, y[rows])
        pull = (feat - net.centers[y[rows]]).pow(2).sum(1).mean()
        opt.zero_grad()
        (ce + 0.1 * pull).backward()
        opt.step()
        net.move_centers(feat.detach(), y[rows])
        totals += torch.stack([ce.detach(), pull.detach()]) / world

    with torch.no_grad():
        by_centre = (net.nearest(x_test) == y_test).float().mean().item()
        by_softmax = (net(x_test)[1].argmax(1) == y_test).float().mean().item()
        spread = torch.pdist(net.centers).mean().item()
    if rank == 0:
        print(f"test accuracy: softmax {by_softmax:.4f}, nearest centre {by_centre:.4f}, spread {spread:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
