"""Next-character model on the text of a standard-library module; FSDP2, parameters materialised shard by shard."""
import argparse
import inspect
import textwrap
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    vocab: int = 96
    context: int = 12
    width: int = 32
    hidden: int = 64
    layers: int = 2
    batch: int = 32
    steps: int = 40
    lr: float = 3e-3
    seed: int = 5


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.width * c.context)
        self.up = nn.Linear(c.width * c.context, c.hidden)
        self.down = nn.Linear(c.hidden, c.width * c.context)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CharModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = nn.Linear(c.width * c.context, c.vocab)

    def forward(self, ids):
        x = self.embed(ids).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fill(p, std):
    nn.init.normal_(p.to_local(), 0.0, std)


@torch.no_grad()
def init_weights(net, c):
    torch.manual_seed(c.seed)
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            p.zero_()
        elif "norm" in name:
            p.fill_(1.0)
        else:
            scale = 1.0 if "embed" in name else p.shape[1] ** -0.5
            fill(p, scale / (2 * c.layers) ** 0.5 if "down" in name else scale)


def build(c, mesh):
    with torch.device("meta"):
        net = CharModel(c)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.to_empty(device="cpu")
    init_weights(net, c)
    return net


def main():
    c = Config()
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=c.steps)
    ap.add_argument("--lr", type=float, default=c.lr)
    for key, value in vars(ap.parse_args()).items():
        setattr(c, key, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    raw = inspect.getsource(textwrap) + inspect.getsource(argparse)[:40000]
    text = torch.tensor([min(max(ord(ch) - 31, 0), c.vocab - 1) for ch in raw])
    starts = torch.Generator().manual_seed(1)

    net = build(c, mesh)
    opt = torch.optim.AdamW(net.parameters(), lr=c.lr, weight_decay=0.01)
    window = torch.arange(c.context + 1)
    for step in range(c.steps):
        at = torch.randint(0, len(text) - c.context - 1, (c.batch,), generator=starts)
        chunk = text[at.chunk(world)[rank][:, None] + window]
        loss = F.cross_entropy(net(chunk[:, :-1]), chunk[:, -1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
