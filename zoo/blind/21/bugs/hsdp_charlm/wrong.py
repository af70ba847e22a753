"""Next-character model on a synthetic grammar, trained with hybrid sharding
(replicas between nodes, shards inside a node)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
VOCAB, CONTEXT, WIDTH = 20, 8, 32
GLOBAL_BATCH, STEPS = 32, 16


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH // CONTEXT * 2)
        self.proj = nn.Linear(WIDTH * 2, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.proj(self.embed(tokens).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_text(n, seed=3):
    gen = torch.Generator().manual_seed(seed)
    jump = torch.rand(VOCAB, VOCAB, generator=gen) ** 6
    text = [0]
    draws = torch.rand(n, generator=gen)
    cdf = (jump / jump.sum(1, keepdim=True)).cumsum(1)
    for u in draws.tolist():
        text.append(min(int((cdf[text[-1]] < u).sum()), VOCAB - 1))
    return torch.tensor(text)


def shard_model(model, world):
    per_node = max(1, world // 2)
    mesh = init_device_mesh("cpu", (world // per_node, per_node),
                            mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def main():
    rank, world = setup()
    torch.manual_seed(0)
    model = shard_model(CharModel(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    text = make_text(3000)
    order = torch.Generator().manual_seed(11)
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (GLOBAL_BATCH,), generator=order)
        starts = starts[rank * local:(rank + 1) * local]
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(window[:, :-1]), window[:, -1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step:3d}  loss {shown.item() / world:.10f}")

    norm = sum(p.detach().full_tensor().pow(2).sum() for p in model.parameters()).sqrt()
    if rank == 0:
        print(f"weight norm {norm.item():.10f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
