"""Language model with shared input and output embedding, cut into pipeline stages by hand (GPipe schedule)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, DIM, LAYERS = 24, 20, 32, 4
MICRO_BATCHES, MICRO_SIZE, STEPS = 4, 8, 40


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, groups=DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.mlp(self.conv(h).transpose(1, 2))


class Stage(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.first, self.last = rank == 0, rank == world - 1
        embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(embed.weight, std=0.1)
        blocks = [ConvBlock() for _ in range(LAYERS)]
        per_stage = LAYERS // world
        keep = range(rank * per_stage, (rank + 1) * per_stage)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in keep})
        if self.first or self.last:
            self.embed = embed
        if self.last:
            self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        if self.first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            x = self.norm(x) @ self.embed.weight.T
        return x


def markov_batch(step):
    gen = torch.Generator().manual_seed(77)
    table = (3 * torch.randn(VOCAB, VOCAB, generator=gen)).softmax(-1).cumsum(-1)
    gen.manual_seed(1000 + step)
    rows = MICRO_BATCHES * MICRO_SIZE
    draws = torch.rand(rows, LENGTH + 1, generator=gen)
    token, out = torch.randint(VOCAB, (rows,), generator=gen), []
    for t in range(LENGTH + 1):
        token = torch.searchsorted(table[token], draws[:, t:t + 1].contiguous()).squeeze(1).clamp(max=VOCAB - 1)
        out.append(token)
    tokens = torch.stack(out, dim=1)
    return tokens[:, :-1].chunk(MICRO_BATCHES), tokens[:, 1:].chunk(MICRO_BATCHES)


def forward_backward(stage, rank, inputs, labels):
    saved, total = [], torch.zeros(())
    for m in range(MICRO_BATCHES):
        if stage.first:
            x = inputs[m]
        else:
            x = torch.empty(MICRO_SIZE, LENGTH, DIM)
            dist.recv(x, src=rank - 1)
            x.requires_grad_()
        y = stage(x)
        if stage.last:
            y = F.cross_entropy(y.flatten(0, 1), labels[m].flatten()) / MICRO_BATCHES
            total += y.detach()
        else:
            dist.send(y.detach().contiguous(), dst=rank + 1)
        saved.append((x, y))
    for x, y in saved:
        if stage.last:
            y.backward()
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, src=rank + 1)
            y.backward(grad)
        if not stage.first:
            dist.send(x.grad.contiguous(), dst=rank - 1)
    return total


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ends = None
    if world > 1:
        dist.init_process_group("gloo")
        ends = dist.new_group([0, world - 1])
    torch.manual_seed(13)
    stage = Stage(rank, world)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3, momentum=0.9)

    for step in range(STEPS):
        inputs, labels = markov_batch(step)
        optimizer.zero_grad()
        loss = forward_backward(stage, rank, inputs, labels)
        if world > 1 and (stage.first or stage.last):
            dist.all_reduce(stage.embed.weight.grad, group=ends)
            stage.embed.weight.grad /= dist.get_world_size(ends)
        optimizer.step()
        if world > 1:
            dist.broadcast(loss, src=world - 1)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.10f}")

    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
