"""Grows a residual net on two circles: after every stage one more block goes in before the head."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_circles
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STAGES, STEPS, WIDTH = 64, 3, 30, 24


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def grow(self):
        block = Block(WIDTH)
        nn.init.zeros_(block.down.bias)
        nn.init.normal_(block.down.weight, std=0.02)
        self.blocks.append(block)
        return block

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29701").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    points, labels = make_circles(1024, noise=0.12, factor=0.5, random_state=1)
    points = torch.tensor(points, dtype=torch.float32)
    labels = torch.tensor(labels)
    order = torch.Generator().manual_seed(11)

    torch.manual_seed(3)
    net = Growing()
    model = DDP(net)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)

    for stage in range(STAGES):
        if stage > 0:
            block = net.grow()
            opt.add_param_group({"params": list(block.parameters())})
            model = DDP(net)
        for _ in range(STEPS):
            picked = torch.randint(0, len(points), (BATCH,), generator=order)[rank::world]
            loss = F.cross_entropy(model(points[picked]), labels[picked])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            total = F.cross_entropy(net(points), labels).item()
        if rank == 0:
            print(f"stage {stage}: {len(net.blocks)} blocks, loss {total:.5f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
