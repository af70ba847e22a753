"""Vector-quantised autoencoder on image patches with an averaged codebook."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PATCH, CODES, DIM = 36, 32, 8
BATCH = 96
STEPS = 30


def patches(n, seed):
    shapes = torch.randn(12, PATCH, generator=torch.Generator().manual_seed(50))
    g = torch.Generator().manual_seed(seed)
    which = torch.randint(0, len(shapes), (n,), generator=g)
    amplitude = 0.5 + torch.rand(n, 1, generator=g)
    return amplitude * shapes[which] + 0.2 * torch.randn(n, PATCH, generator=g)


class Codebook(nn.Module):
    def __init__(self, decay=0.9, eps=1e-3):
        super().__init__()
        self.decay, self.eps = decay, eps
        codes = 0.5 * torch.randn(CODES, DIM)
        self.register_buffer("codes", codes)
        self.register_buffer("usage", torch.ones(CODES))
        self.register_buffer("total", codes.clone())

    def forward(self, z):
        with torch.no_grad():
            distance = z.square().sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(1)
            index = distance.argmin(dim=1)
            quantised = self.codes[index]
            if self.training:
                self.update(z, index)
        commitment = F.mse_loss(z, quantised)
        return z + (quantised - z).detach(), commitment, index

    def update(self, z, index):
        hot = F.one_hot(index, CODES).to(z.dtype)
        counts = hot.sum(dim=0)
        sums = hot.t() @ z
        self.usage.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        self.codes.copy_(self.total / (self.usage + self.eps).unsqueeze(1))


class PatchModel(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PATCH, width), nn.GELU(), nn.Linear(width, DIM))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, PATCH))

    def forward(self, x):
        quantised, commitment, index = self.codebook(self.encoder(x))
        return self.decoder(quantised), commitment, index


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(77)
    torch.cuda.manual_seed_all(77)

    net = PatchModel().to(device)
    model = DDP(net, device_ids=[device.index]) if dist.is_initialized() else net
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    data = patches(3840, seed=51).pin_memory()
    pick = torch.Generator().manual_seed(52)

    for step in range(STEPS):
        index = torch.randint(0, len(data), (BATCH,), generator=pick)[rank::world]
        x = data[index].to(device, non_blocking=True)
        out, commitment, _ = model(x)
        reconstruction = F.mse_loss(out, x)
        loss = reconstruction + 0.25 * commitment
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            shown = torch.stack([reconstruction.detach(), commitment.detach()])
            if dist.is_initialized():
                dist.all_reduce(shown)
            shown = (shown / world).tolist()
            if rank == 0:
                print(f"step {step + 1} reconstruction {shown[0]:.4f} commitment {shown[1]:.4f}")

    net.eval()
    with torch.no_grad():
        x = patches(480, seed=53)[rank::world].to(device)
        out, _, index = net(x)
        error = F.mse_loss(out, x, reduction="sum")
        used = torch.bincount(index, minlength=CODES)
    if dist.is_initialized():
        dist.all_reduce(error)
        dist.all_reduce(used)
    share = used[used > 0].double() / used.sum()
    if rank == 0:
        print(f"held-out mse {error.item() / (480 * PATCH):.4f} perplexity {torch.exp(-(share * share.log()).sum()).item():.2f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
