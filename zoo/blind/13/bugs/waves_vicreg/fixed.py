"""Self-supervised embedding of noisy waves (invariance, variance and covariance terms)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class AllMean(torch.autograd.Function):
    """Mean of a tensor over all processes."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def spread_terms(z):
    z = z - AllMean.apply(z.mean(dim=0))
    cov = AllMean.apply(z.T @ z / len(z))
    std = torch.sqrt(cov.diagonal() + 1e-4)
    off = cov - torch.diag(cov.diagonal())
    return F.relu(1 - std).mean(), (off ** 2).sum() / cov.shape[0]


def views(step, batch, length):
    g = torch.Generator().manual_seed(1000 + step)
    t = torch.linspace(0, 6.28, length)
    freq = torch.randint(1, 6, (batch, 1), generator=g)
    phase = 6.28 * torch.rand(batch, 1, generator=g)
    clean = torch.sin(freq * t + phase)
    return [clean + 0.3 * torch.randn(batch, length, generator=g) for _ in range(2)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.03)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 12))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for step in range(args.steps):
        a, b = (v[rank::world] for v in views(step, args.batch, 40))
        za, zb = model(torch.cat([a, b])).chunk(2)
        near = F.mse_loss(za, zb)
        var_a, cov_a = spread_terms(za)
        var_b, cov_b = spread_terms(zb)
        loss = 5 * near + 5 * (var_a + var_b) + cov_a + cov_b
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 7:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown / world:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
