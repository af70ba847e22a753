import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29833")


class Deep(nn.Module):
    """One shared layer is used again and again; activations are computed a second time in the backward pass."""

    def __init__(self, width=32, times=6):
        super().__init__()
        self.first = nn.Linear(30, width)
        self.again = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.spare = nn.Linear(width, 5)
        self.last = nn.Linear(width, 1)
        self.times = times

    def forward(self, x):
        h = self.first(x)
        for _ in range(self.times):
            h = h + checkpoint(self.again, h, use_reentrant=False)
        return self.last(h).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = ((x - x.mean(0)) / x.std(0)).clamp(-3, 3)
    y = torch.tensor(data.target, dtype=torch.float32)
    torch.manual_seed(50 + rank)
    model = Deep()
    net = DDP(model, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.004)
    used = [p for n, p in net.named_parameters() if "spare" not in n]
    opt = torch.optim.SGD(used, lr=0.02, momentum=0.9, nesterov=True)
    order = torch.Generator().manual_seed(3)
    for step in range(80):
        rows = torch.randint(len(x), (64,), generator=order)
        mine = rows[rank * 64 // world:(rank + 1) * 64 // world]
        loss = F.binary_cross_entropy_with_logits(net(x[mine]), y[mine])
        net.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(used, 2.0)
        opt.step()
        if step % 16 == 15:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item():.6f}", flush=True)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            right = ((model(x) > 0) == (y > 0.5)).float().mean()
        print(f"right {right.item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
