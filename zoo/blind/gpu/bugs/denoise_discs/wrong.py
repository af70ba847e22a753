"""Denoising autoencoder for small grey-scale discs, trained in half precision."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 48
EPOCHS = 3
SIGMA = 0.25


def discs(n, size=24, seed=11):
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    cx, cy = torch.rand(2, n, 1, 1, generator=g) - 0.5
    radius = 0.2 + 0.4 * torch.rand(n, 1, 1, generator=g)
    distance = ((xx - cx) ** 2 + (yy - cy) ** 2).sqrt()
    return torch.sigmoid(20 * (radius - distance)).unsqueeze(1)


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.down1 = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1)

    def forward(self, x):
        a = F.gelu(self.down1(x))
        b = F.gelu(self.down2(a))
        b = F.gelu(self.mid(b))
        c = F.gelu(self.up1(b))
        return self.up2(torch.cat([a, c], dim=1))


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")

    torch.manual_seed(3)
    torch.cuda.manual_seed_all(3)
    train = TensorDataset(discs(480))
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=5)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler, pin_memory=True, drop_last=True)

    net = Denoiser().to(device, memory_format=torch.channels_last)
    model = DDP(net, device_ids=[device.index], gradient_as_bucket_view=True) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 11)
    noise_gen = torch.Generator(device=device).manual_seed(77)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for (clean,) in loader:
            clean = clean.to(device, non_blocking=True, memory_format=torch.channels_last)
            noise = torch.randn(clean.shape, generator=noise_gen, device=device)
            noisy = clean + SIGMA * noise
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(noisy)
            loss = F.mse_loss(out.float(), clean)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total.item() / (len(loader) * world):.5f}")

    held_out = discs(96, seed=12)
    corrupted = held_out + SIGMA * torch.randn(held_out.shape, generator=torch.Generator().manual_seed(13))
    x = corrupted[rank::world].to(device, memory_format=torch.channels_last)
    y = held_out[rank::world].to(device)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        err = (net(x).float() - y).square().sum()
    if world > 1:
        dist.all_reduce(err)
    psnr = -10 * torch.log10(err / held_out.numel())
    if rank == 0:
        print(f"held-out psnr {psnr.item():.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
