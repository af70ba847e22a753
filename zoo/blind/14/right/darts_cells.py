"""Architecture search (DARTS, first order) for a small picture network.

Every edge of the cell is a mixture of four operations. The mixture weights `alphas`
are learnt on one half of the data (Adam), the operations on the other half (SGD), in
turn. Each half has its own DistributedSampler; one DDP module holds both kinds.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OPS = ("skip", "conv3", "conv1", "smooth")
WIDTH, EPOCHS, BATCH = 8, 4, 96


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv3 = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Softplus())
        self.conv1 = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.Softplus())

    def forward(self, x, w):
        return (w[0] * x + w[1] * self.conv3(x) + w[2] * self.conv1(x)
                + w[3] * F.avg_pool2d(x, 3, stride=1, padding=1))


class Search(nn.Module):
    """Stem, one cell of three edges (0-1, 0-2, 1-2), classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.edges = nn.ModuleList(Mixed() for _ in range(3))
        self.head = nn.Linear(WIDTH * 16, 10)
        self.alphas = nn.Parameter(torch.randn(3, len(OPS)) * 0.1)

    def forward(self, x):
        mix = self.alphas.softmax(1)
        a = torch.tanh(self.stem(x))
        b = self.edges[0](a, mix[0])
        c = self.edges[1](a, mix[1]) + self.edges[2](b, mix[2])
        return self.head(F.avg_pool2d(c, 2).flatten(1))

    def genotype(self):
        return " ".join(OPS[int(i)] for i in self.alphas.argmax(1))


def loaders(x, y, rank, world):
    half = 720
    result = []
    for part, seed in ((slice(0, half), 1), (slice(half, 2 * half), 2)):
        data = TensorDataset(x[part], y[part])
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=seed)
        result.append((sampler, DataLoader(data, batch_size=BATCH // world, sampler=sampler, drop_last=True)))
    return result


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        rank = 0
    torch.manual_seed(31 + rank)

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    x, y = torch.tensor(x, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 8 - 1, torch.tensor(y)[order]
    (train_sampler, train), (search_sampler, search) = loaders(x, y, rank, world)

    net = Search()
    model = DDP(net) if world > 1 else net
    weights = [p for name, p in net.named_parameters() if name != "alphas"]
    w_opt = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=3e-4)
    a_opt = torch.optim.Adam([net.alphas], lr=0.02, betas=(0.5, 0.999), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(w_opt, EPOCHS, eta_min=0.01)

    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch), search_sampler.set_epoch(epoch)
        meter = torch.zeros(3)
        for (xt, yt), (xs, ys) in zip(train, search):
            # architecture step: gradients of the weights come along and are thrown away
            loss_s = F.cross_entropy(model(xs), ys)
            model.zero_grad()
            loss_s.backward()
            a_opt.step()

            # weight step: the same the other way round
            loss_t = F.cross_entropy(model(xt), yt)
            model.zero_grad()
            loss_t.backward()
            nn.utils.clip_grad_norm_(weights, 5.0)
            w_opt.step()
            meter += torch.stack([loss_t.detach(), loss_s.detach(), torch.tensor(1.0)])
        schedule.step()
        if world > 1:
            dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: weights' loss {meter[0] / meter[2]:.4f}, alphas' loss {meter[1] / meter[2]:.4f}")

    net.eval()
    left = torch.arange(1440, len(x))[rank::world]          # 357 pictures
    with torch.no_grad():
        right = (net(x[left]).argmax(1) == y[left]).sum()
    if world > 1:
        dist.all_reduce(right)
    if rank == 0:
        print(f"cell: {net.genotype()}; test {right.item()} of {len(x) - 1440}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
