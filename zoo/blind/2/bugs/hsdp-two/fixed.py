import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

torch.set_num_threads(1)
VOCAB, CTX, DIM = 40, 24, 32
STEPS, GLOBAL_BATCH = 24, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, d // 4).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(CTX, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x))


def corpus(n=6000):
    g = torch.Generator().manual_seed(1)
    trans = torch.rand(VOCAB, VOCAB, generator=g).pow(8)
    out = [0]
    for _ in range(n):
        out.append(torch.multinomial(trans[out[-1]], 1, generator=g).item())
    return torch.tensor(out)


def parallelize(model, world):
    # two copies of the model, each spread over half of the ranks
    replicas = min(2, world)
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    fsdp = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for blk in model.blocks:
        fully_shard(blk, **fsdp)
    fully_shard(model, **fsdp)
    return mesh


def lr_at(step, base=3e-3, warmup=4):
    if step < warmup:
        return base * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = LM()
    mesh = parallelize(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text = corpus()
    gen = torch.Generator().manual_seed(99)
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = lr_at(step)
        starts = torch.randint(0, len(text) - CTX - 1, (GLOBAL_BATCH,), generator=gen).tolist()[rank::world]
        xb = torch.stack([text[s:s + CTX] for s in starts])
        yb = torch.stack([text[s + 1:s + CTX + 1] for s in starts])
        loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 7:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1:3d} | loss {mean.item() / world:.4f} | lr {lr_at(step):.2e} | mesh {tuple(mesh.shape)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
