"""Language model of rhyming couplets, cut into pipeline stages (GPipe, four micro-batches).

Four causal blocks are spread over the processes; the first stage has the embedding, the last one the output layer,
which uses the same matrix as the embedding. Every process draws the batch itself. The last stage reports.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

VOCAB, WIDTH, LENGTH = 30, 24, 16
BLOCKS, MICRO = 4, 4
BATCH, STEPS = 32, 40


class Block(nn.Module):
    """A causal convolution over time and a small network at each position."""

    def __init__(self, reach=4):
        super().__init__()
        self.reach = reach
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, reach)
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        past = F.pad(self.norm1(x).transpose(1, 2), (self.reach - 1, 0))
        x = x + self.mix(past).transpose(1, 2)
        return x + self.net(self.norm2(x))


class Poet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight


class Part(nn.Module):
    """What one process holds of the poet."""

    def __init__(self, poet, rank, world):
        super().__init__()
        size = BLOCKS // world
        self.embed = poet.embed if rank == 0 else None
        self.blocks = poet.blocks[rank * size:(rank + 1) * size]
        self.norm = poet.norm if rank == world - 1 else None
        self.head = poet.head if rank == world - 1 else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


def couplets(count, seed):
    """The second line repeats the first with every symbol moved on by the last one of the line."""
    g = torch.Generator().manual_seed(seed)
    half = LENGTH // 2
    first = torch.randint(VOCAB // 2, (count, 1), generator=g) + torch.arange(half + 1) * 3
    noise = (torch.rand(count, half + 1, generator=g) < 0.1) * torch.randint(VOCAB, (count, half + 1), generator=g)
    first = (first + noise) % VOCAB
    return torch.cat([first, (first[:, :half] + 1) % VOCAB], 1)


def loss_fn(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29618")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    first, last = rank == 0, rank == world - 1

    torch.manual_seed(3)
    part = Part(Poet(), rank, world)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=loss_fn)
    optimizer = torch.optim.Adam(part.parameters(), lr=4e-3)

    lines = couplets(512, seed=1)
    picks = torch.Generator().manual_seed(2)
    for step in range(1, STEPS + 1):
        batch = lines[torch.randint(len(lines), (BATCH,), generator=picks)]
        inputs, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        optimizer.zero_grad()
        losses = []
        args = (inputs,) if first else ()
        if last:
            schedule.step(*args, target=target, losses=losses)
        else:
            schedule.step(*args)
        optimizer.step()
        if last and step % 8 == 0:
            print(f"step {step:2d} loss {torch.stack(losses).mean().item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
