"""FSDP2: fully_shard on a small encoder for masked token prediction."""
import os
import time
import textwrap
import inspect
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30123")

SEQ, DIM, HEADS, BATCH, STEPS, VOCAB, MASK = 24, 32, 4, 16, 60, 128, 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.up, self.gate, self.down = nn.Linear(DIM, 64, bias=False), nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, DIM))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def batches(rank, world):
    text = torch.tensor([c for c in inspect.getsource(textwrap).encode() if c < VOCAB])
    g = torch.Generator().manual_seed(0)
    while True:
        start = torch.randint(len(text) - SEQ, (BATCH,), generator=g)
        y = torch.stack([text[s:s + SEQ] for s in start.tolist()])
        # every sequence has its own masking rate, so the processes see different numbers of targets
        masked = torch.rand(BATCH, SEQ, generator=g) < torch.rand(BATCH, 1, generator=g) * 0.5
        masked[:, 0] |= ~masked.any(1)
        x = y.masked_fill(masked, MASK)
        y = y.masked_fill(~masked, -100)
        n = BATCH // world
        yield x[rank * n:(rank + 1) * n], y[rank * n:(rank + 1) * n]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)
    stream = batches(rank, world)
    for step in range(1, STEPS + 1):
        x, y = next(stream)
        n_targets = (y != -100).sum()
        dist.all_reduce(n_targets)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / n_targets
        # reduce-scatter averages, but the loss is already normalised by the targets of the whole batch
        (loss * world).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = total.full_tensor()
        opt.step()
        opt.zero_grad()
        if step % 15 == 0:
            log = loss.detach().clone()
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {step} loss {log:.5f} grad norm {total:.5f}")
    full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(full, "encoder.pt")
        print(f"{len(full)} tensors, embedding norm {full['tok.weight'].norm():.5f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
