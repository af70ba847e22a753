"""MLP cut into as many pipeline stages as there are processes, GPipe schedule with four micro-batches."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

BATCH, CHUNKS, STEPS = 64, 4, 20


def layers():
    torch.manual_seed(16)
    mods = [nn.Sequential(nn.Linear(64, 48), nn.GELU())]
    mods += [nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU()) for _ in range(2)]
    mods += [nn.Linear(48, 10)]
    return mods


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29718").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    all_layers = layers()
    per = len(all_layers) // world
    part = nn.Sequential(*all_layers[rank * per:(rank + 1) * per])
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=nn.CrossEntropyLoss())
    opt = torch.optim.Adam(part.parameters(), lr=3e-3)
    first, last = rank == 0, rank == world - 1

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    gen = torch.Generator().manual_seed(23)
    for step in range(1, STEPS + 1):
        ids = torch.randint(1500, (BATCH,), generator=gen)
        losses = []
        opt.zero_grad()
        args = (x[ids],) if first else ()
        kwargs = dict(target=y[ids], losses=losses) if last else {}
        schedule.step(*args, **kwargs)
        opt.step()
        if last and step % 5 == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
