"""Hand-written data parallelism with decayed and undecayed parameter groups."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, BATCH = 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def all_reduce_mean(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(320, WIDTH)
    y = x.roll(1, dims=1).sin()
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    for step in range(24):
        rows = torch.arange(BATCH) + (step * world_size + rank) * BATCH
        rows = rows % len(x)
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        all_reduce_mean(decay + others)
        optimizer.step()
        if rank == 0 and step % 8 == 0:
            print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
