import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.parallel import DistributedDataParallel as DDP


class Projector(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.GELU())
        self.project = nn.Linear(48, dim)

    def forward(self, x):
        return F.normalize(self.project(self.backbone(x)), dim=1)


def augment(x, gen):
    """Noise and random erasing of pixels, drawn for the whole batch."""
    noise = 0.15 * torch.randn(x.shape, generator=gen)
    keep = (torch.rand(x.shape, generator=gen) > 0.2).float()
    return (x + noise) * keep


def gathered(z):
    return torch.cat(dist_fn.all_gather(z))


def nt_xent(a, b, temperature=0.2):
    scores = a @ b.t() / temperature
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target))


def main(batch=64, steps=100):
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29821")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    torch.manual_seed(5)
    model = DDP(Projector())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    gen = torch.Generator().manual_seed(15)
    share = batch // world
    mine = slice(rank * share, (rank + 1) * share)

    for step in range(1, steps + 1):
        rows = torch.randperm(1400, generator=gen)[:batch]
        views = torch.stack([augment(x[rows], gen), augment(x[rows], gen)])[:, mine]
        z = model(views.flatten(0, 1)).unflatten(0, (2, share))
        a, b = z[0], z[1]
        loss = nt_xent(a, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f}")

    with torch.no_grad():
        features = model.module.backbone(x).numpy()
    if rank == 0:
        knn = KNeighborsClassifier(5).fit(features[:1400], digits.target[:1400])
        print(f"knn accuracy {knn.score(features[1400:], digits.target[1400:]):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
