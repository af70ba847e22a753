"""Character model of Python keywords and builtins, FSDP2 + NovoGrad.

NovoGrad keeps one second moment for each layer (the squared norm of its
gradient) in place of one for each weight.
"""
import builtins
import keyword
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONTEXT = 6
WIDTH = 32


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))


class NameModel(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.mix = nn.Linear(8 * CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, ctx):
        h = self.mix(self.embed(ctx).flatten(1))
        for b in self.blocks:
            h = b(h)
        return self.head(h)


class NovoGrad(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, betas=(0.9, 0.6), eps=1e-8, weight_decay=1e-3):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.to_local(), p.grad.to_local()
                sq = g.pow(2).sum()
                dist.all_reduce(sq)
                st = self.state[p]
                if not st:
                    st["v"] = sq.clone()
                    st["m"] = torch.zeros_like(g)
                else:
                    st["v"].mul_(b2).add_(sq, alpha=1 - b2)
                d = g / (st["v"].sqrt() + group["eps"]) + group["weight_decay"] * w
                st["m"].mul_(b1).add_(d)
                w.add_(st["m"], alpha=-group["lr"])


def windows():
    names = sorted(set(keyword.kwlist) | {n for n in dir(builtins) if n.isalpha()})
    chars = ["."] + sorted(set("".join(names)))
    code = {c: i for i, c in enumerate(chars)}
    xs, ys = [], []
    for name in names:
        ctx = [0] * CONTEXT
        for c in name + ".":
            xs.append(ctx)
            ys.append(code[c])
            ctx = ctx[1:] + [code[c]]
    return torch.tensor(xs), torch.tensor(ys), len(chars)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29634")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    xs, ys, vocab = windows()
    torch.manual_seed(8)
    model = NameModel(vocab)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = NovoGrad(model.parameters())

    pick = torch.Generator().manual_seed(21)
    for step in range(40):
        rows = torch.randint(0, len(xs), (64,), generator=pick).chunk(world)[rank]
        loss = F.cross_entropy(model(xs[rows]), ys[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 8 == 0:
            avg = loss.detach().clone()
            dist.all_reduce(avg)
            if rank == 0:
                print(f"[{step:02d}] loss {avg.item() / world:.5f}")

    with torch.no_grad():
        nll = F.cross_entropy(model(xs), ys).item()
    if rank == 0:
        print(f"final nll on all windows: {nll:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
