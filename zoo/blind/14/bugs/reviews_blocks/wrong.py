"""Sentiment of short reviews with a small transformer encoder, sharded with FSDP2.

A review is twenty tokens; a few tokens carry weight, and a "not" turns the token after it round.
Plain `python` trains on one process, `torchrun` on several; a step always sees 32 reviews.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, LENGTH, NOT = 50, 20, 0


def reviews(count, seed):
    g = torch.Generator().manual_seed(seed)
    lexicon = torch.randn(VOCAB, generator=torch.Generator().manual_seed(77))
    tokens = torch.randint(1, VOCAB, (count, LENGTH), generator=g)
    tokens[torch.rand(count, LENGTH, generator=g) < 0.15] = NOT
    weight = lexicon[tokens] * (tokens != NOT)
    weight[:, 1:] *= 1 - 2 * (tokens[:, :-1] == NOT).float()
    return TensorDataset(tokens, (weight.sum(1, keepdim=True) > 0).float())


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, width=32, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build(mesh):
    torch.manual_seed(11)
    model = Encoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


@torch.no_grad()
def evaluate(model, data, rank, world):
    tokens, labels = data[rank::world]
    logits = model(tokens)
    sums = torch.stack([
        F.binary_cross_entropy_with_logits(logits, labels, reduction="sum"),
        ((logits > 0) == labels.bool()).float().sum(),
    ])
    dist.all_reduce(sums)
    return (sums / len(data)).tolist()


def main(epochs=2, batch=32):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29614")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))

    train, test = reviews(640, seed=1), reviews(160, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=4)
    loader = DataLoader(train, batch_size=batch // world, sampler=sampler)
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for step, (tokens, labels) in enumerate(loader):
            loss = F.binary_cross_entropy_with_logits(model(tokens), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        value, accuracy = evaluate(model, test, rank, world)
        if rank == 0:
            mean = total.item() / (world * len(loader))
            print(f"epoch {epoch}: train {mean:.4f} test {value:.4f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
