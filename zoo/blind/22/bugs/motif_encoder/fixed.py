"""Which motif is hidden in a symbol sequence? Transformer built on the meta device, sharded with FSDP2."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

torch.set_default_dtype(torch.float64)

ALPHABET, LENGTH, MOTIFS = 16, 20, 8
BATCH, STEPS = 64, 12
SEED = 1234


def make_sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    motifs = torch.randint(0, ALPHABET, (MOTIFS, 4), generator=torch.Generator().manual_seed(0))
    x = torch.randint(0, ALPHABET, (n, LENGTH), generator=g)
    y = torch.randint(0, MOTIFS, (n,), generator=g)
    at = torch.randint(0, LENGTH - 4, (n,), generator=g)
    columns = at.unsqueeze(1) + torch.arange(4)
    return x.scatter(1, columns, motifs[y]), y


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, d=32, heads=4, depth=2):
        super().__init__()
        self.symbol = nn.Embedding(ALPHABET, d)
        self.position = nn.Embedding(LENGTH, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(depth))
        self.final_norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, MOTIFS)

    def forward(self, x):
        h = self.symbol(x) + self.position(torch.arange(x.size(1)))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.final_norm(h).mean(1))


@torch.no_grad()
def init_weights(model, seed):
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        std = 0.5 if "symbol" in name or "position" in name else p.shape[1] ** -0.5
        full = torch.empty(p.shape).normal_(std=std, generator=g)
        p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    with torch.device("meta"):
        model = Encoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    init_weights(model, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    x, y = make_sequences(2048, seed=1)
    pick = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        rows = torch.randint(0, len(x), (BATCH,), generator=pick)[rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        norm = norm.full_tensor()
        if rank == 0 and step % 3 == 0:
            print(f"step {step:3d} loss {mean.item():.6f} grad norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
