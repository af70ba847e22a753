"""Short-term forecasting with dilated convolutions."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HISTORY, HORIZON = 48, 6
TEST_ROWS = 61


class Series(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(HISTORY + HORIZON).float()
        period = 6 + 18 * torch.rand(n, 1, generator=g)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        level = torch.randn(n, 1, generator=g)
        trend = 0.02 * torch.randn(n, 1, generator=g)
        wave = torch.sin(6.28 * t / period + phase) * (0.5 + torch.rand(n, 1, generator=g))
        self.values = level + trend * t + wave + 0.1 * torch.randn(n, len(t), generator=g)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        row = self.values[i]
        return i, row[:HISTORY].unsqueeze(0), row[HISTORY:]


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Conv1d(1, width, 3, padding=1)
        self.dilated = nn.ModuleList(nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in (1, 2, 4, 8))
        self.out = nn.Linear(2 * width, HORIZON)

    def forward(self, x):
        last = x[..., -1]
        h = F.gelu(self.inp(x - last.unsqueeze(-1)))
        for conv in self.dilated:
            h = h + F.gelu(conv(h))
        return last + self.out(torch.cat([h[..., -1], h.mean(dim=-1)], dim=1))


@torch.no_grad()
def score(net, dataset, rank, world, device):
    """Mean absolute error over the test set."""
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, pin_memory=True)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    place = rank
    for index, x, y in loader:
        keep = torch.arange(len(index)) * world + place < len(dataset)
        place += len(index) * world
        error = (net(x.to(device, non_blocking=True)) - y.to(device, non_blocking=True)).abs().mean(dim=1)
        keep = keep.to(device)
        totals[0] += error[keep].sum()
        totals[1] += keep.sum()
    if world > 1:
        dist.all_reduce(totals)
    return (totals[0] / totals[1]).item(), int(totals[1])


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(130)

    train, test = Series(480, seed=131), Series(TEST_ROWS, seed=132)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=2)
    loader = DataLoader(train, batch_size=48 // world, sampler=sampler, num_workers=2, pin_memory=True,
                        persistent_workers=True)
    net = Forecaster().to(device)
    model = DDP(net, device_ids=[device.index]) if world > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=True)
    best = float("inf")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for _, x, y in loader:
            loss = F.smooth_l1_loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            running += loss.detach()
        if world > 1:
            dist.all_reduce(running)
        mae, rows = score(net, test, rank, world, device)
        best = min(best, mae)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / len(loader) / world:.5f} mae {mae:.5f} on {rows} rows")
    if rank == 0:
        print(f"best mae {best:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
