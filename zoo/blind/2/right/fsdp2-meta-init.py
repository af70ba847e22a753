"""Digit strings -> reversed digit strings with a small decoder, sharded with fully_shard, built on the meta device."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.RMSNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x, rot):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        q, k = (torch.cat([z[..., ::2] * rot[0] - z[..., 1::2] * rot[1],
                           z[..., ::2] * rot[1] + z[..., 1::2] * rot[0]], -1) for z in (q, k))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab=13, d=36, heads=3, layers=2, max_len=18):
        super().__init__()
        self.half, self.max_len = d // heads // 2, max_len
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.register_buffer("rot", torch.empty(2, max_len, self.half), persistent=False)
        self.reset_rope()

    def reset_rope(self):
        ang = torch.arange(self.max_len)[:, None] * 50.0 ** (-torch.arange(self.half) / self.half)
        if not self.rot.is_meta:
            self.rot.copy_(torch.stack([ang.cos(), ang.sin()]))

    def forward(self, t):
        x = self.emb(t)
        for b in self.blocks:
            x = b(x, self.rot[:, :t.shape[1]])
        return self.head(self.norm(x))


def make_batch(n, length, g):
    d = torch.randint(0, 10, (n, length), generator=g)
    mid = torch.full((n, 1), 10)
    return torch.cat([d, mid, d.flip(1)], 1)


def loss_of(model, seq):
    out = model(seq[:, :-1]).float()
    half = seq.shape[1] // 2
    return F.cross_entropy(out[:, half:].flatten(0, 1), seq[:, half + 1:].flatten())


def main(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = Decoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for b in model.blocks:
        fully_shard(b, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.reset_rope()
    full = {}
    if rank == 0:
        torch.manual_seed(args.seed)
        full = Decoder().state_dict()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps)
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        batch = make_batch(args.global_batch, 8, g).chunk(world)[rank]
        parts = batch.chunk(args.accumulate)
        opt.zero_grad()
        total = 0.0
        for i, p in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = loss_of(model, p) / len(parts)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        sched.step()
        if step % 6 == 5:
            log = torch.tensor(total)
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {step + 1} loss {log / world:.4f} grad norm {norm:.4f}")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "/tmp/decoder_full.pt")
        print("saved", sum(v.numel() for v in state.values()), "values")
    dist.barrier()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--bf16", type=int, default=0)
    ap.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(ap.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
