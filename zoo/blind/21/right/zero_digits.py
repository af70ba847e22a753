"""Patch transformer on the digits images, AdamW states sharded over ranks, one restart in the middle."""
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS, TOTAL, STOP_AT = 64, 2, 22, 9


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.mlp(self.n2(x))


class PatchNet(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 2, stride=2)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 16, d))
        self.blocks = nn.Sequential(Block(d), Block(d))
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.blocks(h).mean(1))


def lr_at(step):
    if step < 4:
        return (step + 1) / 4
    return 0.5 * (1 + math.cos(math.pi * (step - 4) / (TOTAL - 4)))


def build(seed):
    torch.manual_seed(seed)
    net = DDP(PatchNet())
    opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=8e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)
    return net, opt, sched


def train(net, opt, sched, x, y, start, stop, rank, world):
    per_epoch = TOTAL // EPOCHS
    for step in range(start, stop):
        epoch, pos = divmod(step, per_epoch)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        ids = order[pos * BATCH:(pos + 1) * BATCH][rank::world]
        loss = F.cross_entropy(net(x[ids]), y[ids])
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        total = loss.detach() / world
        dist.all_reduce(total)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {total:.5f} norm {norm:.4f} lr {sched.get_last_lr()[0]:.6f}")


def main():
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    digits = load_digits()
    x = torch.tensor(digits.images).to(torch.get_default_dtype())[:, None] / 8 - 1
    y = torch.tensor(digits.target)
    x, y, xv, yv = x[:720], y[:720], x[720:1020], y[720:1020]

    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    path = os.path.join(where[0], "state.pt")

    net, opt, sched = build(seed=1)
    train(net, opt, sched, x, y, 0, STOP_AT, rank, world)
    opt.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(),
                    "sched": sched.state_dict(), "step": STOP_AT}, path)
    dist.barrier()

    net, opt, sched = build(seed=2)
    state = torch.load(path, weights_only=False)
    net.module.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    sched.load_state_dict(state["sched"])
    train(net, opt, sched, x, y, state["step"], TOTAL, rank, world)

    net.eval()
    with torch.no_grad():
        right = (net.module(xv[rank::world]).argmax(1) == yv[rank::world]).sum()
    dist.all_reduce(right)
    if rank == 0:
        os.remove(path)
        print(f"held out accuracy {right.item() / len(xv):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
