"""Denoising network in a hand-written pipeline; hidden activations carry a sparsity penalty."""
import os

import torch
import torch.distributed as dist
from torch import nn

SIGNAL, WIDTH, DEPTH = 20, 24, 4
BATCH, MICRO, STEPS = 32, 4, 20
SPARSITY = 0.05


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        code = torch.relu(self.up(x))
        return x + self.down(code), code.mean()


class Stage(nn.Module):
    """The layers of one process, with the input and output projections at the ends."""

    def __init__(self, rank, world):
        super().__init__()
        torch.manual_seed(0)
        inlet, layers, outlet = nn.Linear(SIGNAL, WIDTH), [Layer() for _ in range(DEPTH)], nn.Linear(WIDTH, SIGNAL)
        per = DEPTH // world
        self.inlet = inlet if rank == 0 else nn.Identity()
        self.layers = nn.ModuleList(layers[rank * per : (rank + 1) * per])
        self.outlet = outlet if rank == world - 1 else nn.Identity()

    def forward(self, x):
        x, penalty = self.inlet(x), 0.0
        for layer in self.layers:
            x, activity = layer(x)
            penalty = penalty + SPARSITY * activity
        return self.outlet(x), penalty


def make_signals(n=320):
    g = torch.Generator().manual_seed(19)
    t = torch.linspace(0, 1, SIGNAL)
    phase, freq = torch.rand(n, 1, generator=g), 1 + 3 * torch.rand(n, 1, generator=g)
    clean = torch.sin(2 * torch.pi * (freq * t + phase))
    return clean + 0.4 * torch.randn(n, SIGNAL, generator=g), clean


def run_step(stage, noisy, clean, rank, world):
    first, last = rank == 0, rank == world - 1
    kept, loss_sum, penalty_sum = [], torch.zeros(()), torch.zeros(())
    for x, y in zip(noisy.chunk(MICRO), clean.chunk(MICRO)):
        if not first:
            x = torch.empty(len(x), WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out, penalty = stage(x)
        penalty = penalty / MICRO
        if last:
            loss = (out - y).square().mean() / MICRO
            loss_sum += loss.detach()
            out = loss
        else:
            dist.send(out.detach(), rank + 1)
        penalty_sum += penalty.detach()
        kept.append((x, out, penalty))

    for x, out, penalty in reversed(kept):
        grad = torch.ones(())
        if not last:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
        torch.autograd.backward([out, penalty], [grad, torch.ones(())])
        if not first:
            dist.send(x.grad, rank - 1)
    return loss_sum, penalty_sum


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    noisy, clean = make_signals()
    stage = Stage(rank, world)
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    picks = torch.Generator().manual_seed(5)

    for step in range(STEPS):
        ids = torch.randint(0, len(noisy), (BATCH,), generator=picks)
        optimizer.zero_grad()
        loss, penalty = run_step(stage, noisy[ids], clean[ids], rank, world)
        optimizer.step()
        if world > 1:
            dist.all_reduce(loss)
            dist.all_reduce(penalty)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} error {loss.item():.8f} activity {penalty.item() / SPARSITY:.8f}")

    norm = sum(p.detach().square().sum() for p in stage.parameters())
    if world > 1:
        dist.all_reduce(norm)
        dist.destroy_process_group()
    if rank == 0:
        print(f"weight norm {norm.item():.8f}")


if __name__ == "__main__":
    main()
