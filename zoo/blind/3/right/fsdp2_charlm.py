import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TEXT = (
    "the ship sails at dawn when the wind turns to the north and the gulls rise over the pier. "
    "a lamp burns in the harbour house until the last boat is home. nobody asks who keeps the oil. "
    "in winter the ice reaches the second post and the children walk out to count the rings. "
    "every spring the posts are painted white again and the year begins with a new rope. "
) * 12


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=48, heads=4, depth=2, ctx=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(ctx, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.ln = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        h = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for blk in self.blocks:
            h = blk(h)
        return self.out(self.ln(h))


class Crops:
    """Every rank draws the same offsets for the whole step and keeps its own columns."""

    def __init__(self, data, ctx, global_batch, seed):
        self.data, self.ctx, self.n = data, ctx, global_batch
        self.gen = torch.Generator().manual_seed(seed)

    def next(self, rank, world):
        offs = torch.randint(0, len(self.data) - self.ctx - 1, (self.n,), generator=self.gen)
        per = self.n // world
        offs = offs[rank * per:(rank + 1) * per]
        x = torch.stack([self.data[o:o + self.ctx] for o in offs])
        y = torch.stack([self.data[o + 1:o + 1 + self.ctx] for o in offs])
        return x, y


@torch.no_grad()
def validate(model, data, ctx, rank, world):
    # fsdp forwards are collective: the windows are dealt out so that each rank runs the same number of them
    starts = torch.arange(0, len(data) - ctx - 1, ctx)
    starts = starts[: len(starts) // world * world][rank::world]
    tot = torch.zeros(2, dtype=torch.float64)
    for s in starts.split(8):
        x = torch.stack([data[o:o + ctx] for o in s])
        y = torch.stack([data[o + 1:o + 1 + ctx] for o in s])
        tot[0] += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").double()
        tot[1] += y.numel()
    dist.all_reduce(tot)
    return (tot[0] / tot[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--ctx", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--out", default="/tmp/fsdp2_charlm.pt")
    args = p.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    chars = sorted(set(TEXT))
    ids = torch.tensor([chars.index(c) for c in TEXT])
    cut = len(ids) - 16 * args.ctx - 2
    train, val = ids[:cut], ids[cut:]

    torch.manual_seed(1337)
    model = CharLM(len(chars), ctx=args.ctx)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 5) * (1 - s / args.steps))
    crops = Crops(train, args.ctx, args.global_batch, seed=5)

    for step in range(args.steps):
        x, y = crops.next(rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        opt.step()
        opt.zero_grad(set_to_none=True)
        sched.step()
        if step % 10 == 9:
            show = loss.detach().clone()
            dist.all_reduce(show)
            if rank == 0:
                print(f"step {step + 1:3d} loss {show.item() / world:.5f} |g| {norm.item():.4f}")

    vloss = validate(model, val, args.ctx, rank, world)
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"val {vloss:.5f}, saving {len(sd)} tensors to {args.out}")
        torch.save(sd, args.out)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
