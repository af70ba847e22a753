"""Dose from fluorescence of well plates, with batch norm as plate correction.

A plate of 24 wells has an offset and a gain of its own, so each plate is one forward
pass and is normalised by its own wells (also in the test; no running statistics). A
step is made of four plates: a process takes 4 / world of them, one after another,
without exchange of gradients until the last one.
"""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WELLS, CHANNELS, PLATES_PER_STEP = 24, 10, 4


class Plates(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        kind = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(99))
        self.dose = torch.rand(n, WELLS, generator=g)
        signal = torch.sin(4 * self.dose[..., None] * kind) + 0.5 * self.dose[..., None] ** 2
        offset, gain = 3 * torch.randn(n, 1, CHANNELS, generator=g), torch.exp(0.6 * torch.randn(n, 1, 1, generator=g))
        self.light = gain * (signal + 0.1 * torch.randn(n, WELLS, CHANNELS, generator=g)) + offset

    def __len__(self):
        return len(self.dose)

    def __getitem__(self, i):
        return self.light[i], self.dose[i]


class Corrected(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.plate = nn.BatchNorm1d(CHANNELS, affine=False, track_running_stats=False)
        self.lift = nn.Linear(CHANNELS, width, bias=False)
        self.norm1 = nn.BatchNorm1d(width, track_running_stats=False)
        self.mid = nn.Linear(width, width, bias=False)
        self.norm2 = nn.BatchNorm1d(width, track_running_stats=False)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = nn.functional.silu(self.norm1(self.lift(self.plate(x))))
        x = x + nn.functional.silu(self.norm2(self.mid(x)))
        return self.out(x)[:, 0]


def main():
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group(backend="gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = 0, 1
    torch.manual_seed(8)
    net = Corrected()
    model = DistributedDataParallel(net) if distributed else net
    torch.manual_seed(8 + rank)

    train, test = Plates(40, 1), Plates(14, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=4)
    loader = DataLoader(train, batch_size=None, sampler=sampler)          # one plate at a time
    decayed = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim == 1]
    optimizer = torch.optim.Adam([{"params": decayed, "weight_decay": 1e-4}, {"params": plain}], lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)
    per_step = PLATES_PER_STEP // world

    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = 0.0
        for number, (light, dose) in enumerate(loader, 1):
            hold = distributed and number % per_step != 0
            with model.no_sync() if hold else nullcontext():
                loss = nn.functional.mse_loss(model(light), dose)
                (loss / per_step).backward()
            total += loss.item()
            if number % per_step == 0:
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        log = torch.tensor([total], dtype=torch.float64)
        if distributed:
            dist.all_reduce(log)
        if rank == 0:
            print(f"epoch {epoch}: error of a plate {log.item() / len(train):.5f}, rate {schedule.get_last_lr()[0]}")

    # 14 plates over the processes: some get one more
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for i in range(rank, len(test), world):
            light, dose = test[i]
            sums += torch.tensor([(net(light) - dose).square().sum().item(), float(WELLS)])
    if distributed:
        dist.all_reduce(sums)
    if rank == 0:
        print(f"test plates: mean squared error {sums[0] / sums[1]:.5f} of {int(sums[1])} wells")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
