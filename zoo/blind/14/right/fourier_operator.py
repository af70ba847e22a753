"""Fourier neural operator for Burgers' equation, u(0) -> u(T), on a ring of 48 points.

Spectral weights are complex; gradients are summed over the processes by hand in one
real message. A batch of 30 fields is shared out unevenly where 30 does not divide.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

POINTS, MODES, WIDTH, BATCH = 48, 10, 12, 30


def burgers(n, seed, nu=0.05, time=0.6, steps=300):
    rng = np.random.default_rng(seed)
    grid, modes = np.arange(POINTS) / POINTS * 2 * np.pi, np.arange(1, MODES + 1)[:, None]
    amplitude, phase = rng.normal(size=(n, MODES, 1)) / modes, rng.uniform(0, 2 * np.pi, (n, MODES, 1))
    u = (amplitude * np.sin(modes * grid + phase)).sum(1) + 0.3 * rng.normal(size=(n, 1))
    start, h, dx = u.copy(), time / steps, 2 * np.pi / POINTS
    for _ in range(steps):
        right, left = np.roll(u, -1, 1), np.roll(u, 1, 1)
        u = u + h * (nu * 4 * (right - 2 * u + left) / dx ** 2 - (right ** 2 - left ** 2) / (4 * dx))
    return torch.tensor(start, dtype=torch.float32), torch.tensor(u, dtype=torch.float32)


class Spectral(nn.Module):
    """Multiplies modes 1 .. MODES by complex matrices; the mean goes through the pointwise layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(MODES, WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.point = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):                                    # batch, points, WIDTH
        modes = torch.fft.rfft(x, dim=1)[:, 1:MODES + 1]
        mixed = torch.einsum("bki,kio->bko", modes, self.weight)
        mixed = torch.cat([mixed.new_zeros(len(x), 1, WIDTH), mixed], 1)
        return torch.fft.irfft(mixed, n=POINTS, dim=1) + self.point(x)


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Spectral() for _ in range(3))
        self.drop = nn.Linear(WIDTH, 1)

    def forward(self, u):
        angle = torch.arange(POINTS) / POINTS * 2 * torch.pi
        x = self.lift(torch.stack([u, angle.sin().expand_as(u), angle.cos().expand_as(u)], -1))
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return u + self.drop(x)[..., 0]


def relative(out, truth):
    return (out - truth).norm(dim=1) / truth.norm(dim=1)


def real(t):
    return torch.view_as_real(t) if t.is_complex() else t


@torch.no_grad()
def add_up(parameters):
    grads = [real(p.grad) for p in parameters]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))
    return flat.norm().item()


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29626")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(rank)
    net = Operator()
    for p in net.parameters():
        dist.broadcast(real(p.detach()), 0)
    optimizer = torch.optim.Adam(net.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.5)
    u, v = burgers(180, 1)
    ut, vt = burgers(50, 2)

    for epoch in range(6):
        order = torch.randperm(len(u), generator=torch.Generator().manual_seed(epoch))
        seen = torch.zeros((), dtype=torch.float64)
        for batch in order.split(BATCH):
            own = batch.tensor_split(world)[rank]            # 30; 15, 15; 8, 8, 7, 7
            loss = relative(net(u[own]), v[own]).sum() / len(batch)
            optimizer.zero_grad()
            loss.backward()
            norm = add_up(list(net.parameters()))
            optimizer.step()
            schedule.step()
            seen += loss.item()
        error = torch.zeros(())
        with torch.no_grad():
            error += relative(net(ut[rank::world]), vt[rank::world]).sum()
        dist.all_reduce(seen), dist.all_reduce(error)
        if rank == 0:
            print(f"epoch {epoch}: loss {seen.item() / 6:.4f}, last norm {norm:.3f}, test error {error.item() / len(ut):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
