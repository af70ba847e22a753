"""Unroll the swiss roll with an autoencoder under FullyShardedDataParallel."""
import functools
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_swiss_roll
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class AutoEncoder(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.decode = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def forward(self, x):
        code = self.encode(x)
        return self.decode(code), code


def main(batch=96, steps=120):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29848")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    points, _ = make_swiss_roll(1600, noise=0.1, random_state=6)
    x = torch.tensor((points - points.mean(0)) / points.std(0), dtype=torch.float32)

    torch.manual_seed(51)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=2000)
    model = FSDP(AutoEncoder(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    gen = torch.Generator().manual_seed(52)
    for step in range(1, steps + 1):
        rows = torch.randint(1400, (batch,), generator=gen).view(world, -1)[rank]
        out, code = model(x[rows])
        loss = (out - x[rows]).square().mean() + 1e-3 * code.square().mean()
        opt.zero_grad()
        loss.backward()
        norm = model.clip_grad_norm_(0.25)
        opt.step()
        if step % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f} norm {norm.item():.4f}")

    with torch.no_grad():
        out, _ = model(x[1400:])
        error = (out - x[1400:]).square().mean()
    if rank == 0:
        print(f"held-out error {error.item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
