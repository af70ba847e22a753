"""Sequence classifier, tensor parallel by DTensor's styles; every process reads the same batches."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SEED = 90
WIDTH = 32


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(24, WIDTH)
        self.mixers = nn.ModuleList([Mixer(), Mixer()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.inp(x)
        for m in self.mixers:
            x = m(x)
        return self.head(x)


def waves(n, gen):
    kind = torch.randint(3, (n,), generator=gen)
    t = torch.linspace(0, 1, 24)
    phase = torch.rand(n, 1, generator=gen)
    x = torch.sin(6.283 * ((kind[:, None] + 1) * t + phase))
    return x + 0.5 * torch.randn(n, 24, generator=gen), kind


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "30411")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    torch.manual_seed(SEED)
    model = Classifier()
    for mixer in model.mixers:
        parallelize_module(mixer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(SEED)
    x_test, y_test = waves(256, gen)

    for step in range(60):
        x, y = waves(48, gen)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 14:
            model.eval()
            with torch.no_grad():
                test = F.cross_entropy(model(x_test), y_test).item()
            model.train()
            if rank == 0:
                print(f"step {step + 1} train {loss.item():.5f} test {test:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
