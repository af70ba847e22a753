"""Word by word rewriting of weaving patterns: four blocks in a pipeline of processes, micro-batches forward then back."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
VOCAB, WIDTH, LONGEST, BLOCKS, PAD = 20, 24, 24, 4, 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.mix(F.gelu(self.conv(y)).transpose(1, 2))


class Stage(nn.Module):
    """Every process builds the whole network and keeps its own part."""

    def __init__(self, rank, world):
        super().__init__()
        embed, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        blocks = [Block() for _ in range(BLOCKS)]
        n = BLOCKS // world
        self.embed = embed if rank == 0 else nn.Identity()
        self.blocks = nn.Sequential(*blocks[rank * n:(rank + 1) * n])
        self.head = head if rank == world - 1 else nn.Identity()

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def patterns(n, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, LONGEST + 1, (n,), generator=g)
    source = torch.randint(1, VOCAB, (n, LONGEST), generator=g)
    before = F.pad(source[:, :-1], (1, 0))
    target = (3 * source + before) % (VOCAB - 1) + 1
    outside = torch.arange(LONGEST)[None] >= lengths[:, None]
    return source.masked_fill(outside, PAD), target.masked_fill(outside, PAD), lengths


def train_step(stage, source, target, rank, world):
    micro_inputs, micro_targets = source.chunk(world), target.chunk(world)
    words = (target != PAD).sum()
    kept, total = [], torch.zeros(())
    for x, y in zip(micro_inputs, micro_targets):
        if rank > 0:
            x = torch.empty(len(y), LONGEST, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = stage(x)
        if rank < world - 1:
            dist.send(out.detach().contiguous(), rank + 1)
        else:
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            out = loss / words
            total += out.detach()
        kept.append((x, out))
    for x, out in reversed(kept):
        if rank < world - 1:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        else:
            out.backward()
        if rank > 0:
            dist.send(x.grad.contiguous(), rank - 1)
    return total


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(15)
    stage = Stage(rank, world)
    opt = torch.optim.Adam(stage.parameters(), lr=4e-3)
    source, target, lengths = patterns(640, 2)
    g = torch.Generator().manual_seed(3)
    for epoch in range(4):
        losses = torch.zeros(())
        batches = torch.randperm(len(source), generator=g).split(32)
        for batch in batches:
            batch = batch[lengths[batch].argsort(stable=True)]
            opt.zero_grad()
            losses += train_step(stage, source[batch], target[batch], rank, world)
            opt.step()
        if world > 1:
            dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch} loss {losses / len(batches):.8f}")
    size = sum(p.detach().square().sum() for p in stage.parameters())
    if world > 1:
        dist.all_reduce(size)
    if rank == 0:
        print(f"weights {size:.9f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
