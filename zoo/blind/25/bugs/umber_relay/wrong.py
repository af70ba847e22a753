"""GPipe by hand: four residual blocks on the digits, cut into as many stages as there are processes.

Every process keeps len(blocks) / world blocks; activations go down the line with send/recv and their
gradients come back the same way. One process runs all four blocks itself.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

WIDTH = 48
N_BLOCKS = 4


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.inlet = nn.Linear(64, WIDTH) if index == 0 else None
        self.norm = nn.LayerNorm(WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH * 2)
        self.b = nn.Linear(WIDTH * 2, WIDTH)
        self.outlet = nn.Linear(WIDTH, 10) if index == N_BLOCKS - 1 else None

    def forward(self, x):
        if self.inlet is not None:
            x = self.inlet(x)
        x = x + self.b(F.gelu(self.a(self.norm(x))))
        return x if self.outlet is None else self.outlet(x)


class PipelineStage:
    def __init__(self, rank, world, micro_batches):
        blocks = [Block(i) for i in range(N_BLOCKS)]
        share = N_BLOCKS // world
        self.net = nn.Sequential(*blocks[rank * share:(rank + 1) * share])
        self.rank, self.last, self.micro = rank, world - 1, micro_batches

    def step(self, x, y):
        """Forward of every micro-batch, then backward of every micro-batch; returns the mean loss (last stage)."""
        xs, ys = x.chunk(self.micro), y.chunk(self.micro)
        saved, total = [], 0.0
        for xm, ym in zip(xs, ys):
            if self.rank > 0:
                inp = torch.empty(len(xm), WIDTH)
                dist.recv(inp, src=self.rank - 1)
                inp.requires_grad_()
            else:
                inp = xm
            out = self.net(inp)
            if self.rank < self.last:
                dist.send(out.detach().contiguous(), dst=self.rank + 1)
            else:
                out = F.cross_entropy(out, ym) / self.micro
                total += out.item()
            saved.append((inp, out))
        for inp, out in saved:
            if self.rank < self.last:
                grad = torch.empty_like(out)
                dist.recv(grad, src=self.rank + 1)
                out.backward(grad)
            else:
                out.backward()
            if self.rank > 0:
                dist.send(inp.grad.contiguous(), dst=self.rank - 1)
        return total


def clip_gradients(params, max_norm):
    grads = [p.grad for p in params]
    squares = torch.stack([g.pow(2).sum() for g in grads]).sum()
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--max-norm", type=float, default=0.5)
    ap.add_argument("--lr", type=float, default=0.2)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16.0, dtype=torch.float32)
    labels = torch.tensor(labels)
    torch.manual_seed(1234)
    stage = PipelineStage(rank, world, args.micro)
    opt = torch.optim.SGD(stage.net.parameters(), lr=args.lr, momentum=0.9)
    pick = torch.Generator().manual_seed(8)

    for step in range(args.steps):
        idx = torch.randint(len(labels), (args.batch,), generator=pick)
        opt.zero_grad()
        loss = stage.step(images[idx], labels[idx])
        norm = clip_gradients(list(stage.net.parameters()), args.max_norm)
        opt.step()
        if step % 10 == 9:
            shown = torch.tensor([loss])
            dist.broadcast(shown, src=world - 1)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.5f} grad norm {norm.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
