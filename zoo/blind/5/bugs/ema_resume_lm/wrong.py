"""Small transformer over library source, fully sharded; the run is continued from its own checkpoint."""
import argparse
import heapq
import inspect
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

CONTEXT = 32


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (s.view(b, t, self.heads, -1).transpose(1, 2) for s in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Ema:
    """Moving average of the weights, held in the layout of the shards."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.to_local().detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.to_local(), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model):
        for n, p in model.named_parameters():
            p.to_local().copy_(self.shadow[n])


def build(args):
    torch.manual_seed(args.seed)
    model = TinyLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6), Ema(model, args.decay)


def save(folder, model, optimizer, ema):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=os.path.join(folder, "state"))
    if dist.get_rank() == 0:
        torch.save(ema.shadow, os.path.join(folder, "ema.pt"))
    dist.barrier()


def load(folder, model, optimizer, ema):
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=os.path.join(folder, "state"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    ema.shadow = torch.load(os.path.join(folder, "ema.pt"))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--restart-at", type=int, default=18)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--decay", type=float, default=0.9)
    ap.add_argument("--seed", type=int, default=4)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="lm_") if rank == 0 else None]
    dist.broadcast_object_list(folder)

    text = torch.tensor([min(ord(c), 127) for c in inspect.getsource(heapq)])
    rows = text[:len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    train, held = rows[:-64], rows[-64:]
    model, optimizer, ema = build(args)

    for step in range(args.steps):
        if step == args.restart_at:
            save(folder[0], model, optimizer, ema)
            model, optimizer, ema = build(args)
            load(folder[0], model, optimizer, ema)
        picked = torch.randint(len(train), (args.batch,), generator=torch.Generator().manual_seed(step))
        ids = train[picked.chunk(world)[rank]]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)

    ema.copy_to(model)
    ids = held.chunk(world)[rank]
    with torch.no_grad():
        result = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / world
    dist.all_reduce(result)
    if rank == 0:
        print(f"held-out loss of the averaged weights {result.item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
