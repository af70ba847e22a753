"""Next-note model with a vocabulary-parallel output layer and label smoothing."""
import os

import torch
import torch.distributed as dist
from torch import nn

NOTES, CONTEXT, WIDTH = 32, 8, 24
BATCH, STEPS, SMOOTHING = 32, 40, 0.15


class Enter(torch.autograd.Function):
    """Identity forward, sum over the processes backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if dist.is_initialized():
            dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Sum over the processes forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class VocabHead(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        size = NOTES // world
        self.lo, self.hi = rank * size, (rank + 1) * size
        full = torch.randn(NOTES, WIDTH) * WIDTH**-0.5
        self.weight = nn.Parameter(full[self.lo : self.hi].clone())
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden):
        return Enter.apply(hidden) @ self.weight.T + self.bias

    def loss(self, logits, target):
        top = logits.detach().amax(1)
        if dist.is_initialized():
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        log_z = Reduce.apply(logits.exp().sum(1)).log()
        inside = (target >= self.lo) & (target < self.hi)
        column = (target - self.lo).clamp(0, self.hi - self.lo - 1)
        chosen = logits.gather(1, column[:, None]).squeeze(1) * inside
        chosen = Reduce.apply(chosen)
        nll = log_z - chosen
        smooth = log_z - Reduce.apply(logits.sum(1)) / NOTES
        return ((1 - SMOOTHING) * nll + SMOOTHING * smooth).mean()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NOTES, 12)
        self.mix = nn.Sequential(nn.Linear(12 * CONTEXT, 48), nn.GELU(), nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, notes):
        return self.mix(self.embed(notes).flatten(1))


def make_melodies(n=400):
    g = torch.Generator().manual_seed(6)
    steps = torch.tensor([-4, -2, -1, 1, 2, 3, 5])
    note = torch.randint(0, NOTES, (n,), generator=g)
    tune = [note]
    habit = torch.randint(0, len(steps), (n, 3), generator=g)
    for t in range(CONTEXT):
        move = steps[habit[:, t % 3]]
        slip = (torch.rand(n, generator=g) < 0.1) * torch.randint(-2, 3, (n,), generator=g)
        tune.append((tune[-1] + move + slip) % NOTES)
    return torch.stack(tune, dim=1)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    melodies = make_melodies()
    torch.manual_seed(0)
    trunk, head = Trunk(), VocabHead(rank, world)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.2, momentum=0.9)
    picks = torch.Generator().manual_seed(1)

    for step in range(STEPS):
        batch = melodies[torch.randint(0, len(melodies), (BATCH,), generator=picks)]
        hidden = trunk(batch[:, :-1])
        loss = head.loss(head(hidden), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} loss {loss.item():.8f}")

    norm = sum(p.detach().square().sum() for p in head.parameters())
    if world > 1:
        dist.all_reduce(norm)
    norm += sum(p.detach().square().sum() for p in trunk.parameters())
    if rank == 0:
        print(f"weight norm {norm.item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
