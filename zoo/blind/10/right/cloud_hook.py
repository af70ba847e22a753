"""Two spirals, DDP whose buckets are summed in double precision before the step."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS = 64, 120


def spirals(count=1200):
    g = torch.Generator().manual_seed(3)
    label = torch.arange(count) % 2
    radius = torch.rand(count, generator=g).sqrt() * 3
    angle = radius * 1.6 + label * torch.pi
    xy = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return xy + 0.05 * torch.randn(count, 2, generator=g), label


def double_sum(state, bucket):
    """The loss is a share of the global mean, so the shares are summed and nothing is divided."""
    wide = bucket.buffer().double()
    work = dist.all_reduce(wide, op=dist.ReduceOp.SUM, async_op=True)
    return work.get_future().then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29801")):
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = spirals()
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    model = DDP(net)
    model.register_comm_hook(None, double_sum)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(4)

    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=order)[rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / BATCH
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 30 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step}: loss {shown.item():.5f}", flush=True)

    with torch.no_grad():
        accuracy = (net(x).argmax(1) == y).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
