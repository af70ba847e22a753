"""Character model cut into a pipeline by hand: 1F1B with isend / recv.

Four parts (embedding, two middle parts, head) lie on 1, 2 or 4 processes. Process 0
reads the inputs, the last one the targets; every process has an optimizer for its own
parts. Gradients are clipped by the norm over all parts.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, MICRO, MICROS, STEPS = 40, 24, 8, 6, 36
SOURCE = ("the early bird catches the worm but the second mouse gets the cheese. "
          "a watched pot never boils and a rolling stone gathers no moss. "
          "many hands make light work yet too many cooks spoil the broth. ") * 6
ALPHABET = sorted(set(SOURCE))
TEXT = torch.tensor([ALPHABET.index(c) for c in SOURCE])


class Conv(nn.Module):
    """Causal, gated, residual."""

    def __init__(self, gap):
        super().__init__()
        self.norm, self.conv, self.gap = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=gap), gap

    def forward(self, x):
        y = self.conv(F.pad(self.norm(x).transpose(1, 2), (2 * self.gap, 0)))
        return x + F.glu(y, 1).transpose(1, 2)


def parts():
    return [nn.Sequential(nn.Embedding(len(ALPHABET), WIDTH), Conv(1)), nn.Sequential(Conv(2), Conv(4)),
            nn.Sequential(Conv(1), Conv(2)), nn.Sequential(Conv(4), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET)))]


class Pipe:
    def __init__(self, stage, rank, world):
        self.stage, self.rank, self.world, self.sent = stage, rank, world, []
        self.first, self.last = rank == 0, rank == world - 1

    def send(self, tensor, to):
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, to), tensor))

    def receive(self, frm):
        buffer = torch.empty(MICRO, LENGTH, WIDTH)
        dist.recv(buffer, frm)
        return buffer

    def forward(self, x, y):
        given = x if self.first else self.receive(self.rank - 1).requires_grad_()
        out = self.stage(given)
        if self.last:
            out = F.cross_entropy(out.flatten(0, 1), y.flatten()) / MICROS
        else:
            self.send(out, self.rank + 1)
        return given, out

    def backward(self, given, out):
        if self.last:
            out.backward()
        else:
            out.backward(self.receive(self.rank + 1))
        if not self.first:
            self.send(given.grad, self.rank - 1)
        return out.detach() if self.last else torch.zeros(())

    def batch(self, xs, ys):
        """One forward, one backward; the warm-up is longer for early stages."""
        ahead, waiting, loss = min(self.world - 1 - self.rank, MICROS), [], torch.zeros(())
        for m in range(MICROS):
            waiting.append(self.forward(xs[m], ys[m]))
            if m >= ahead:
                loss = loss + self.backward(*waiting.pop(0))
        while waiting:
            loss = loss + self.backward(*waiting.pop(0))
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        return loss


def cut(starts):
    rows = TEXT[starts[:, None] + torch.arange(LENGTH + 1)]
    return rows[:, :-1].split(MICRO), rows[:, 1:].split(MICRO)


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    everything = parts()
    each = len(everything) // world
    stage = nn.Sequential(*everything[rank * each:(rank + 1) * each])
    del everything
    pipe = Pipe(stage, rank, world)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=5e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draw = torch.Generator().manual_seed(3)

    for step in range(STEPS):
        xs, ys = cut(torch.randint(0, len(TEXT) - 200, (MICRO * MICROS,), generator=draw))
        optimizer.zero_grad()
        loss = pipe.batch(xs, ys)
        squares = sum(p.grad.double().square().sum() for p in stage.parameters())
        if world > 1:
            dist.all_reduce(squares)
            dist.broadcast(loss, src=world - 1)
        factor = (1.0 / (squares.sqrt().item() + 1e-6))
        if factor < 1:
            for p in stage.parameters():
                p.grad.mul_(factor)
        optimizer.step()
        schedule.step()
        if rank == 0 and step % 9 == 8:
            print(f"step {step + 1}: loss {loss.item():.4f}, norm {squares.sqrt().item():.4f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
