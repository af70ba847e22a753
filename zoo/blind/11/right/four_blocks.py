import os
import time
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29844")

BATCH, PARTS, STEPS = 64, 8, 80


def all_blocks():
    torch.manual_seed(60)
    blocks = [
        nn.Sequential(nn.Linear(64, 40), nn.Tanh()),
        nn.Sequential(nn.Linear(40, 40), nn.Tanh()),
        nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 40), nn.Tanh()),
        nn.Linear(40, 10),
    ]
    return OrderedDict((f"block{k}", block) for k, block in enumerate(blocks))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = list(all_blocks().items())
    per = len(blocks) // world
    own = nn.Sequential(OrderedDict(blocks[rank * per:(rank + 1) * per]))
    stage = PipelineStage(own, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=PARTS, loss_fn=F.cross_entropy)
    opt = torch.optim.Adam(own.parameters(), lr=3e-3 , eps=1e-6)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 20))

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.Generator().manual_seed(7)
    first, last = rank == 0, rank == world - 1
    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=order)
        opt.zero_grad()
        losses = []
        inputs = (x[rows],) if first else ()
        if last:
            schedule.step(*inputs, target=y[rows], losses=losses)
        else:
            schedule.step(*inputs)
        opt.step()
        sched.step()
        if last and step % 20 == 19:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
