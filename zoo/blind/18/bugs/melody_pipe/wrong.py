"""Next-note model over generated melodies, cut into one pipeline stage per process (fill and drain)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NOTES, DIM, LAYERS, LENGTH = 24, 24, 4, 12
BATCH, MICRO, STEPS, MAX_NORM = 32, 4, 30, 0.5

rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
first_stage, last_stage = rank == 0, rank == world - 1


def melodies(count, seed):
    gen = torch.Generator().manual_seed(seed)
    hop = torch.tensor([2, 2, 1, 2, 2, 2, 1])
    note = torch.randint(NOTES, (count,), generator=gen)
    out = [note]
    for i in range(LENGTH):
        move = hop[(note + i) % 7] * torch.randint(0, 2, (count,), generator=gen)
        note = (note + move) % NOTES
        out.append(note)
    return torch.stack(out, 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, 2 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        gate, value = self.mix(self.norm(x)).chunk(2, -1)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        past = value.cumsum(1) / steps
        return x + self.out(torch.sigmoid(gate) * past)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        table = torch.randn(NOTES, DIM) * 0.3
        layers = [Layer() for _ in range(LAYERS)]
        per = LAYERS // world
        self.layers = nn.ModuleList(layers[rank * per:(rank + 1) * per])
        if first_stage or last_stage:
            self.table = nn.Parameter(table)
        if last_stage:
            self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        if first_stage:
            x = F.embedding(x, self.table)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.table.T if last_stage else x


def run(stage, batch):
    """One step over all micro-batches; gradients are left in the stage. Returns the mean loss (last stage)."""
    kept, total = [], torch.zeros(())
    for part in batch.chunk(MICRO):
        if first_stage:
            given = part[:, :-1]
        else:
            given = torch.empty(len(part), LENGTH, DIM)
            dist.recv(given, rank - 1)
            given.requires_grad_()
        made = stage(given)
        if last_stage:
            made = F.cross_entropy(made.flatten(0, 1), part[:, 1:].flatten()) / MICRO
            total += made.detach()
        else:
            dist.send(made.detach(), rank + 1)
        kept.append((given, made))
    for given, made in kept:
        if last_stage:
            made.backward()
        else:
            grad = torch.empty_like(made)
            dist.recv(grad, rank + 1)
            made.backward(grad)
        if not first_stage:
            dist.send(given.grad, rank - 1)
    return total


def global_norm(stage):
    square = torch.zeros(())
    for p in stage.parameters():
        square += p.grad.pow(2).sum()
    if world > 1:
        dist.all_reduce(square)
    return square.sqrt()


def main():
    torch.set_default_dtype(torch.float64)
    if world > 1:
        dist.init_process_group("gloo")
        ends = dist.new_group([0, world - 1])
    stage = Stage()
    opt = torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.8)
    songs = melodies(BATCH * 10, seed=1)
    for step in range(STEPS):
        at = step % 10 * BATCH
        opt.zero_grad()
        loss = run(stage, songs[at:at + BATCH])
        if world > 1:
            if first_stage or last_stage:
                dist.all_reduce(stage.table.grad, group=ends)
            dist.broadcast(loss, world - 1)
        norm = global_norm(stage)
        scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        for p in stage.parameters():
            p.grad.mul_(scale)
        opt.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3d} loss {loss.item():.6f} norm {norm.item():.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
