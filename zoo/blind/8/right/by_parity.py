import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoExperts(nn.Module):
    """Even digits go to one expert, odd digits to the other (the parity is given)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, 40), nn.ReLU())
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 5)) for _ in range(2))

    def forward(self, x, parity):
        h = self.stem(x)
        out = h.new_zeros(len(x), 5)
        for k, expert in enumerate(self.experts):
            rows = (parity == k).nonzero().flatten()
            if rows.numel() > 0:
                out = out.index_copy(0, rows, expert(h[rows]))
        return out


def main(batch=48, steps=100):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29856")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    parity, label = y % 2, y // 2

    torch.manual_seed(19)
    model = DDP(TwoExperts(), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(20)
    for step in range(1, steps + 1):
        rows = torch.randperm(1500, generator=gen)[:batch]
        rows = rows[parity[rows].argsort(stable=True)]      # sorted, so that an expert's rows lie together
        mine = rows.chunk(world)[rank]
        loss = F.cross_entropy(model(x[mine], parity[mine]), label[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f}")

    with torch.no_grad():
        out = model.module(x[1500:], parity[1500:])
    if rank == 0:
        print(f"test loss {F.cross_entropy(out, label[1500:]).item():.5f} "
              f"accuracy {(out.argmax(1) == label[1500:]).float().mean().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
