"""MLP-Mixer on 8x8 digits with FSDP2; hidden matrices use an orthogonalised-momentum optimizer."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

torch.set_default_dtype(torch.float64)


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p.grad)
                buf = state["momentum"]
                buf.mul_(group["momentum"]).add_(p.grad)
                direction = p.grad + group["momentum"] * buf
                scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                update = newton_schulz(direction.full_tensor())
                update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(update, alpha=-group["lr"] * scale)


class MixerBlock(nn.Module):
    def __init__(self, tokens, channels):
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.token_up = nn.Linear(tokens, 2 * tokens)
        self.token_down = nn.Linear(2 * tokens, tokens)
        self.norm2 = nn.LayerNorm(channels)
        self.channel_up = nn.Linear(channels, 2 * channels)
        self.channel_down = nn.Linear(2 * channels, channels)

    def forward(self, x):
        t = self.norm1(x).transpose(1, 2)
        x = x + self.token_down(F.gelu(self.token_up(t))).transpose(1, 2)
        return x + self.channel_down(F.gelu(self.channel_up(self.norm2(x))))


class Mixer(nn.Module):
    def __init__(self, channels=32, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, channels)
        self.blocks = nn.ModuleList(MixerBlock(16, channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, images):
        x = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    digits = load_digits()
    images = torch.tensor(digits.images) / 16.0
    labels = torch.tensor(digits.target)

    torch.manual_seed(3)
    model = Mixer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)]

    batch = 64
    gen = torch.Generator().manual_seed(11)
    for step in range(12):
        index = torch.randint(0, 1500, (batch,), generator=gen)[rank::world]
        loss = F.cross_entropy(model(images[index]), labels[index])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 3 == 2:
            print(f"step {step + 1:3d} loss {total.item() / world:.6f}")

    with torch.no_grad():
        hits = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean()
    if rank == 0:
        print(f"test accuracy {hits.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
