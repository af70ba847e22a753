"""Residual MLP regression; gradients travel between the GPUs in half precision."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INPUTS, TARGETS, ROWS = 16, 3, 960
BATCH = 48
EPOCHS = 3


def energy_surface(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(INPUTS, TARGETS, generator=torch.Generator().manual_seed(31)) / 4
    x = torch.randn(n, INPUTS, generator=g)
    y = torch.sin(2 * x @ w) + 0.5 * (x @ w) ** 2 + 0.05 * torch.randn(n, TARGETS, generator=g)
    return x, y


class ResidualMLP(nn.Module):
    def __init__(self, width=96, depth=3):
        super().__init__()
        self.inp = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, TARGETS)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


def half_precision_hook(group, bucket):
    full = bucket.buffer()
    packed = full.to(torch.float16)
    future = dist.all_reduce(packed, group=group, async_op=True).get_future()

    def unpack(fut):
        full.copy_(fut.value()[0])
        return full

    return future.then(unpack)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(5)

    train = TensorDataset(*energy_surface(ROWS, seed=1))
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler, pin_memory=True)
    net = ResidualMLP().to(device)
    model = net
    if world > 1:
        model = DDP(net, device_ids=[device.index], bucket_cap_mb=1)
        model.register_comm_hook(dist.group.WORLD, half_precision_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=True)

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        start.record()
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = F.smooth_l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.detach()
        stop.record()
        if world > 1:
            dist.all_reduce(running)
        torch.cuda.synchronize()
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / len(loader) / world:.5f} ({start.elapsed_time(stop):.0f} ms)")

    x, y = (t[rank::world].to(device) for t in energy_surface(240, seed=2))
    with torch.no_grad():
        error = F.mse_loss(net(x), y, reduction="sum")
    if world > 1:
        dist.all_reduce(error)
    if rank == 0:
        print(f"test mse {error.item() / (240 * TARGETS):.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
