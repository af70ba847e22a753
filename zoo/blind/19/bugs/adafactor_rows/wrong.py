"""Keyword spotting on synthetic filter-bank features; Adafactor with its update sharded by rows."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORDS, BANDS, FRAMES = 8, 20, 10
GLOBAL_BATCH = 32
STEPS = 30


def total(t):
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


class RowAdafactor:
    """Every process keeps the statistics of, and updates, one block of rows of each parameter."""

    def __init__(self, params, lr, clip=1.0, decay=-0.8):
        self.params = list(params)
        self.lr, self.clip, self.decay = lr, clip, decay
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.state = [{} for _ in self.params]
        self.t = 0

    def block(self, t):
        return t.chunk(self.world)[self.rank]

    @torch.no_grad()
    def step(self):
        self.t += 1
        beta = 1 - self.t**self.decay
        for p, state in zip(self.params, self.state):
            grad = self.block(total(p.grad) / self.world)
            sq = grad.square() + 1e-30
            if p.dim() == 2:
                row = sq.mean(1)
                col = total(sq.sum(0)) / p.shape[0]
                state["row"] = row if beta == 0 else torch.lerp(row, state["row"], beta)
                state["col"] = col if beta == 0 else torch.lerp(col, state["col"], beta)
                mean_row = total(state["row"].sum()) / p.shape[0]
                second = torch.outer(state["row"], state["col"]) / mean_row
            else:
                state["sq"] = sq if beta == 0 else torch.lerp(sq, state["sq"], beta)
                second = state["sq"]
            update = grad / second.sqrt()
            rms = update.square().mean().sqrt()
            update = update / (rms / self.clip).clamp(min=1.0)
            mine = self.block(p) - self.lr * update
            if self.world > 1:
                parts = [torch.empty_like(mine) for _ in range(self.world)]
                dist.all_gather(parts, mine)
                mine = torch.cat(parts)
            p.copy_(mine)
            p.grad = None


def make_speech(n, seed):
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(WORDS, FRAMES, BANDS, generator=torch.Generator().manual_seed(77))
    label = torch.randint(0, WORDS, (n,), generator=g)
    loudness = 0.5 + torch.rand(n, 1, 1, generator=g)
    x = templates[label] * loudness + 1.2 * torch.randn(n, FRAMES, BANDS, generator=g)
    return x.flatten(1).double(), label


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    x, y = make_speech(512, 1)
    x_test, y_test = make_speech(256, 2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FRAMES * BANDS, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, WORDS)
    ).double()
    optimizer = RowAdafactor(model.parameters(), lr=0.01)
    picks = torch.Generator().manual_seed(9)

    for step in range(STEPS):
        batch = torch.randint(0, len(x), (GLOBAL_BATCH,), generator=picks)
        mine = batch[rank::world]
        loss = F.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            shown = total(loss.detach().clone()) / world
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.8f}")

    with torch.no_grad():
        hits = total((model(x_test[rank::world]).argmax(1) == y_test[rank::world]).sum())
    if rank == 0:
        print(f"test accuracy {hits.item() / len(x_test):.4f}")
        norm = sum(p.detach().square().sum() for p in model.parameters())
        print(f"weights {norm.item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
