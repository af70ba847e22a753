"""Contrastive pre-training with two augmented views and a linear probe."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 64
TAU = 0.2


def augment(img, gen):
    """shift by up to one pixel, scale, noise: drawn for the whole batch"""
    n = len(img)
    dx, dy = torch.randint(-1, 2, (2, n), generator=gen)
    img = torch.stack([i.roll((int(a), int(b)), (0, 1)) for i, a, b in zip(img, dx, dy)])
    gain = 0.7 + 0.6 * torch.rand(n, 1, 1, generator=gen)
    return img * gain + 0.1 * torch.randn(img.shape, generator=gen)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        )
        self.proj = nn.Linear(32 * 16, 32)

    def forward(self, x):
        return F.normalize(self.proj(self.body(x.unsqueeze(1))), dim=1)


def gather(z):
    world = dist.get_world_size()
    out = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(out, z.detach())
    out[dist.get_rank()] = z
    return torch.cat(out)


def nce(a, b):
    """a: local queries; keys: the second views of all ranks"""
    keys = gather(b)
    target = torch.arange(len(a)) + dist.get_rank() * len(a)
    return F.cross_entropy(a @ keys.T / TAU, target)


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29671").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32) / 16
    torch.manual_seed(2)
    net = Encoder()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    gen = torch.Generator().manual_seed(99)
    for step in range(1, 26):
        rows = x[torch.randint(1500, (BATCH,), generator=gen)]
        one, two = (augment(rows, gen).chunk(world)[rank] for _ in range(2))
        a, b = model(torch.cat([one, two])).chunk(2)
        loss = (nce(a, b) + nce(b, a)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            v = loss.detach().clone()
            dist.all_reduce(v)
            if rank == 0:
                print(f"step {step} loss {v.item() / world:.5f}")
    if rank == 0:
        with torch.no_grad():
            f = net.body(x.unsqueeze(1)).numpy()
        probe = RidgeClassifier(alpha=10.0).fit(f[:1000], d.target[:1000])
        print(f"probe accuracy {probe.score(f[1500:], d.target[1500:]):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
