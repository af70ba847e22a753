"""Half precision (fp16 autocast) with a GradScaler, accumulation and skipped steps.

Predicts the phase and the decay of noisy oscillations. Batches of 16 rows are dealt to
the processes in turn (as accelerate's BatchSamplerShard does); four of them make an
optimizer step. The scale starts high, so the first steps overflow and are skipped;
it is doubled again after eight good steps.
"""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

ROWS, WINDOW, EPOCHS = 16, 4, 6


class Shuffled(Sampler):
    def __init__(self, n, seed):
        self.n, self.seed, self.epoch = n, seed, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist())


class BatchShare:
    """Batch i of the inner sampler belongs to process i % world."""

    def __init__(self, batches, rank, world):
        self.batches, self.rank, self.world = batches, rank, world

    def __len__(self):
        return len(self.batches) // self.world

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            if i % self.world == self.rank:
                yield batch


def oscillations(n, seed):
    g = torch.Generator().manual_seed(seed)
    phase, decay, pace = torch.rand(3, n, 1, generator=g)
    t = torch.linspace(0, 1, 32)
    waves = torch.exp(-3 * decay * t) * torch.sin(2 * torch.pi * (phase + (1 + pace) * t))
    return (waves + 0.05 * torch.randn(n, 32, generator=g)).float(), torch.cat([torch.sin(2 * torch.pi * phase), decay], 1)


class Reader(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x + torch.tanh(self.second(x)))


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29618")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(5)

    order = Shuffled(640, seed=12)
    loader = DataLoader(TensorDataset(*oscillations(640, 1)),
                        batch_sampler=BatchShare(BatchSampler(order, ROWS, drop_last=True), rank, world))
    xv, yv = oscillations(205, 2)

    model = DDP(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 12, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 24, growth_interval=8)
    own_window = WINDOW // world
    skipped = 0
    for epoch in range(EPOCHS):
        order.epoch = epoch
        loss_sum = torch.zeros(1, dtype=torch.float64)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % own_window == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                loss = F.mse_loss(out.float(), y)
                scaler.scale(loss / WINDOW).backward()      # fp16 sees the same numbers on any number of processes
            loss_sum += loss.item()
            if not last:
                continue
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad.mul_(world)          # the window is a sum, DDP has averaged it
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if scaler.get_scale() < before:
                skipped += 1
            else:
                schedule.step()             # not when the step was skipped
        with torch.no_grad():
            errors = (model.module(xv[rank::world]) - yv[rank::world]).square().sum().double()
        dist.all_reduce(errors), dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss_sum.item() / (world * len(loader)):.4f}, valid {errors.item() / (2 * len(xv)):.4f}, "
                  f"scale 2^{torch.tensor(scaler.get_scale()).log2().int().item()}, skipped {skipped}, "
                  f"rate {schedule.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
