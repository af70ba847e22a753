import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.func import functional_call, grad, vmap

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29851")

BATCH, BOUND, NOISE = 48, 1.0, 0.4


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    torch.manual_seed(18)
    net = nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))
    params = dict(net.named_parameters())
    opt = torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-5)

    def loss_of_row(weights, row, label):
        return F.cross_entropy(functional_call(net, weights, (row[None],)), label[None])

    gradients_by_row = vmap(grad(loss_of_row), in_dims=(None, 0, 0))

    def bounded_sum(rows):
        detached = {k: p.detach() for k, p in params.items()}
        by_row = gradients_by_row(detached, x[rows], y[rows])
        norm = sum(g.flatten(1).square().sum(1) for g in by_row.values()).sqrt()
        scale = (BOUND / norm).clamp(max=1.0)
        return {k: torch.einsum("n,n...->...", scale, g) for k, g in by_row.items()}, (scale < 1).sum()

    for step in range(70):
        luck = torch.Generator().manual_seed(900 + step)
        rows = torch.randperm(len(x), generator=luck)[:BATCH]
        sums, cut = bounded_sum(rows[rank::world])
        dist.all_reduce(cut)
        for name, p in params.items():
            dist.all_reduce(sums[name])
            blur = NOISE * BOUND * torch.randn(p.shape, generator=luck)
            p.grad = (sums[name] + blur) / BATCH
        opt.step()
        if rank == 0 and step % 14 == 13:
            with torch.no_grad():
                loss = F.cross_entropy(net(x), y)
            print(f"step {step + 1}: loss {loss.item():.5f}, {cut.item()} rows shortened", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
