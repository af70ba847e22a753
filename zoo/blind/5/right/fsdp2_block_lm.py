"""Byte transformer with FSDP2; stops half way, writes a full checkpoint, goes on from it with new objects."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Pieces(Dataset):
    def __init__(self, length, count):
        raw = open(argparse.__file__, "rb").read()[: (length + 1) * count]
        self.rows = torch.tensor([b & 127 for b in raw]).view(count, length + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self, dim=32, depth=2, length=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(mesh, lr, weights=None, moments=None):
    """Processes other than the first may pass anything for weights and moments: it is not looked at."""
    model = LM()
    weights = weights if weights is not None else model.state_dict()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, weights, options=SPREAD)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    if moments is not None:
        set_optimizer_state_dict(model, opt, moments, options=SPREAD)
    return model, opt


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=16, help="over all processes")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--clip", type=float, default=0.7)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234 + rank)
    mesh = init_device_mesh("cpu", (world,))
    data = Pieces(48, 320)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "half.pt")

    model, opt = make(mesh, args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for rows in loader:
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
            opt.zero_grad()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world:.4f}")
        weights, moments = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, opt, options=FULL)
        if rank == 0:
            torch.save({"weights": weights, "moments": moments}, path)
            saved = torch.load(path)
        else:
            saved = {"weights": {}, "moments": {}}
        del model, opt
        model, opt = make(mesh, args.lr, saved["weights"], saved["moments"])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
