import os
import time
import heapq

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab, dim=32, heads=4, layers=2, length=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def fill(name, t):
    if t.dim() > 1:
        nn.init.normal_(t, std=0.08)
    elif "norm" in name and name.endswith("weight"):
        nn.init.ones_(t)
    else:
        nn.init.zeros_(t)


@torch.no_grad()
def materialize(model, seed):
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        full = torch.empty(p.shape)
        fill(name, full)
        p.copy_(distribute_tensor(full, p.device_mesh, p.placements))


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29815")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    text = heapq.__about__ + heapq.__doc__
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])

    with torch.device("meta"):
        model = Decoder(len(chars))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    materialize(model, seed=13)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    length, batch, steps = 32, 16, 60
    gen = torch.Generator().manual_seed(2)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - length - 1, (batch,), generator=gen)
        rows = torch.stack([ids[s:s + length + 1] for s in starts[rank::world]])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0 or step == 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{step:3d}  {mean.item() / world:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
