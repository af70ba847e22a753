"""Token tagging with a sharded transformer encoder (replicas of shards)."""
import os
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor

VOCAB, TAGS, LENGTH, WIDTH = 30, 5, 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, ids):
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def initial_value(name, shape):
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    gen = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=gen) * 0.15


def make_data(n, seed):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (n, LENGTH), generator=gen)
    tags = (ids // 6 + (ids.roll(1, dims=1) >= 15)) % TAGS
    # a varying part of each sentence is annotated
    share = torch.rand(n, 1, generator=gen)
    tags[torch.rand(n, LENGTH, generator=gen) < share] = -100
    return ids, tags


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    shards = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))

    with torch.device("meta"):
        model = Tagger()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(initial_value(name, p.shape), p.device_mesh, p.placements))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids, tags = make_data(320, seed=4)
    batch = 32
    for step in range(30):
        gen = torch.Generator().manual_seed(step // 10)
        order = torch.randperm(len(ids), generator=gen)
        rows = order[step % 10 * batch:(step % 10 + 1) * batch]
        annotated = (tags[rows] >= 0).sum()
        mine = rows.chunk(world)[rank]
        logits = model(ids[mine])
        loss = F.cross_entropy(logits, tags[mine].flatten(), reduction="sum") / annotated
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    test_ids, test_tags = make_data(64, seed=5)
    with torch.no_grad():
        logits, test_tags = model(test_ids), test_tags.flatten()
        known = test_tags >= 0
        test_loss = F.cross_entropy(logits[known], test_tags[known])
        accuracy = (logits.argmax(-1)[known] == test_tags[known]).double().mean()
        norm = sum(p.full_tensor().square().sum() for p in model.parameters()).sqrt()
    if rank == 0:
        print(f"test loss {test_loss.item():.10f}  accuracy {accuracy.item():.6f}  |w| {norm.item():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
