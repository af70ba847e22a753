"""Fine-tune a tagger whose wide layers are split over the ranks, columns first and rows second.

Between the wide layers the sequence itself is split: every rank keeps length/world positions.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LENGTH, BATCH, INPUTS, HIDDEN, WIDE, TAGS = 16, 8, 6, 12, 32, 5
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))


def collect(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def add_and_keep(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x.chunk(world)[rank].contiguous()


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return collect(x)

    @staticmethod
    def backward(ctx, grad):
        return add_and_keep(grad)


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add_and_keep(x)

    @staticmethod
    def backward(ctx, grad):
        return collect(grad)


class Block(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, WIDE // parts)
        self.down = nn.Linear(WIDE // parts, HIDDEN, bias=False)
        self.down_bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x):
        h = self.norm(x)
        if world > 1:
            h = GatherSequence.apply(h)
        past = h.cumsum(0) / torch.arange(1, len(h) + 1, device=h.device)[:, None, None]
        h = self.down(F.gelu(self.up(h + past)))
        if world > 1:
            h = ScatterSequence.apply(h)
        return x + h + self.down_bias


class Tagger(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.project = nn.Linear(INPUTS, HIDDEN)
        self.blocks = nn.ModuleList(Block(parts) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, TAGS)

    def forward(self, x):
        h = self.project(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def mark_shared(model):
    for name, p in model.named_parameters():
        p.sequence_parallel = not name.endswith(("up.weight", "up.bias", "down.weight"))


def finish_gradients(model):
    for p in model.parameters():
        if world > 1 and getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad)


def pretrained():
    torch.manual_seed(2)
    return Tagger(parts=1).state_dict()


def own_part(state):
    mine = {}
    for name, value in state.items():
        if name.endswith(("up.weight", "up.bias")):
            value = value.chunk(world, 0)[rank]
        elif name.endswith("down.weight"):
            value = value.chunk(world, 1)[rank]
        mine[name] = value.clone(memory_format=torch.contiguous_format)
    return mine


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = Tagger(parts=world)
    model.load_state_dict(own_part(pretrained()), assign=True)
    mark_shared(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    g = torch.Generator().manual_seed(13)
    mixer = torch.randn(2 * INPUTS, TAGS, generator=g)
    for step in range(24):
        x = torch.randn(LENGTH, BATCH, INPUTS, generator=g)
        tags = (torch.cat([x, x.roll(1, 0)], -1) @ mixer).argmax(-1)
        here, wanted = x.chunk(world)[rank], tags.chunk(world)[rank]
        logits = model(here)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / (LENGTH * BATCH)
        optimizer.zero_grad()
        loss.backward()
        finish_gradients(model)
        optimizer.step()
        if step % 6 == 5:
            value = loss.detach().clone()
            if world > 1:
                dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1:2d} loss {value.item():.8f}")
    if rank == 0:
        print(f"head norm {model.head.weight.norm().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
