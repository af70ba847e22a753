"""Vector-quantised autoencoder for 2x4 patches; the code book follows its inputs by moving averages."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PATCH, DIM, CODES, BATCH = 8, 4, 12, 96


class CodeBook(nn.Module):
    def __init__(self, keep=0.9, eps=1e-3):
        super().__init__()
        self.keep, self.eps = keep, eps
        start = torch.randn(CODES, DIM) * 0.5
        self.register_buffer("codes", start)
        self.register_buffer("used", torch.ones(CODES))
        self.register_buffer("total", start.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(1)
        chosen = self.codes[index]
        if self.training:
            self.follow(z.detach(), index)
        commit = F.mse_loss(z, chosen)
        return z + (chosen - z).detach(), commit, index

    @torch.no_grad()
    def follow(self, z, index):
        onehot = F.one_hot(index, CODES).to(z.dtype)
        used = onehot.sum(0)
        total = onehot.T @ z
        if dist.is_initialized():
            dist.all_reduce(used)
            dist.all_reduce(total)
        self.used.mul_(self.keep).add_(used, alpha=1 - self.keep)
        self.total.mul_(self.keep).add_(total, alpha=1 - self.keep)
        count = self.used.sum()
        smooth = (self.used + self.eps) / (count + CODES * self.eps) * count
        self.codes.copy_(self.total / smooth[:, None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(PATCH, 24), nn.ReLU(), nn.Linear(24, DIM))
        self.book = CodeBook()
        self.dec = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, PATCH))

    def forward(self, x):
        q, commit, index = self.book(self.enc(x))
        return self.dec(q), commit, index


def patches(count, seed):
    gen = torch.Generator().manual_seed(seed)
    kind = torch.randint(6, (count,), generator=gen)
    row, col = torch.arange(2.0)[:, None], torch.arange(4.0)[None]
    shapes = torch.stack([row + 0 * col, col / 3 + 0 * row, (row + col) % 2, 1 - row + 0 * col,
                          (col > 1) + 0.0 * row, 0.5 + 0.0 * (row + col)])
    gain = 0.5 + torch.rand(count, 1, 1, generator=gen)
    return (shapes[kind] * gain + 0.05 * torch.randn(count, 2, 4, generator=gen)).flatten(1)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = 0, 1
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(18)
    net = Net()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    train, test = patches(1920, seed=19), patches(256, seed=20)
    for epoch in range(3):
        model.train()
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(500 + epoch))
        for batch in order.split(BATCH):
            x = train[batch.chunk(world)[rank]]
            made, commit, _ = model(x)
            loss = F.mse_loss(made, x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            made, _, index = net(test)
        share = torch.bincount(index, minlength=CODES) / len(test)
        perplexity = (-(share * (share + 1e-12).log()).sum()).exp().item()
        if rank == 0:
            print(f"epoch {epoch} error {F.mse_loss(made, test).item():.8f} perplexity {perplexity:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
