"""Next-event prediction on long logs; the sequence dimension is spread over the processes."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

EVENTS, LENGTH, WIDTH, HEADS = 12, 48, 24, 2
BATCH, STEPS = 6, 25


class AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def make_logs(n=120):
    g = torch.Generator().manual_seed(23)
    follow = torch.rand(EVENTS, EVENTS, generator=g).pow(6)
    follow = follow / follow.sum(1, keepdim=True)
    logs = [torch.randint(0, EVENTS, (n,), generator=g)]
    for _ in range(LENGTH - 1):
        logs.append(torch.multinomial(follow[logs[-1]], 1, generator=g).squeeze(1))
    return torch.stack(logs, dim=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, position):
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if dist.is_initialized():
            k, v = AllGatherSequence.apply(k), AllGatherSequence.apply(v)
        score = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        future = torch.arange(k.shape[2]) > position[:, None]
        mix = score.masked_fill(future, -math.inf).softmax(3) @ v
        x = x + self.proj(mix.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class LogModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.event, self.place = nn.Embedding(EVENTS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, EVENTS)

    def forward(self, tokens, position):
        x = self.event(tokens) + self.place(position)
        for block in self.blocks:
            x = block(x, position)
        return self.head(x)


def shard(t, rank, world):
    return t.chunk(world, dim=-1)[rank].contiguous()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    logs = make_logs()
    torch.manual_seed(0)
    model = LogModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    position = shard(torch.arange(LENGTH), rank, world)
    picks = torch.Generator().manual_seed(3)

    for step in range(STEPS):
        batch = logs[torch.randperm(len(logs), generator=picks)[:BATCH]]
        tokens = shard(batch, rank, world)
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        count = (labels != -100).sum()
        if world > 1:
            dist.all_reduce(count)
        logits = model(tokens, position)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {shown.item():.8f}")

    if rank == 0:
        print(f"weight norm {sum(p.detach().square().sum() for p in model.parameters()).item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
