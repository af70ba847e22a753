import os
import time
import string

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module)

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29843")

LETTERS = " abcdefghijklmnopqrstuvwxyz.,'()"
WIDTH, LENGTH = 24, 12


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.down(F.gelu(self.up(x + before)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = Mixer()
        self.last_norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mixer(self.norm(x))
        return self.out(self.last_norm(x))


def split(model, mesh):
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "mixer": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mixer.up": ColwiseParallel(),
        "mixer.down": RowwiseParallel(output_layouts=Shard(1)),
        "last_norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })


def text():
    words = (string.Template.__doc__ or "") + str(dict.__doc__) + str(str.split.__doc__) + str(print.__doc__) * 2
    ids = [LETTERS.index(c) for c in words.lower() if c in LETTERS]
    return torch.tensor(ids)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = text()
    torch.manual_seed(rank)
    model = Model()
    split(model, init_device_mesh("cpu", (world,)))
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8, foreach=False)
    gen = torch.Generator().manual_seed(6)
    for step in range(40):
        starts = torch.randint(len(ids) - LENGTH - 1, (16,), generator=gen)
        rows = torch.stack([ids[s:s + LENGTH + 1] for s in starts])
        with loss_parallel():
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
        opt.step()
        if step % 10 == 9:
            value = loss.full_tensor().item()
            if rank == 0:
                print(f"step {step + 1}: {value:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
