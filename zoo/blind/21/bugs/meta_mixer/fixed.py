"""Mixer network built on the meta device, sharded, then materialised and initialised."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

torch.set_default_dtype(torch.float64)
TOKENS, CHANNELS, CLASSES = 8, 16, 5


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(CHANNELS)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 16), nn.GELU(), nn.Linear(16, TOKENS))
        self.norm2 = nn.LayerNorm(CHANNELS)
        self.channels = nn.Sequential(nn.Linear(CHANNELS, 32), nn.GELU(), nn.Linear(32, CHANNELS))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.patch = nn.Linear(6, CHANNELS)
        self.blocks = nn.ModuleList(MixerBlock() for _ in range(depth))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@torch.no_grad()
def init_weights(model, seed):
    gen = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            std = weight.shape[1] ** -0.5
            full = torch.empty(weight.shape).normal_(0, std, generator=gen)
            weight.copy_(distribute_tensor(full, weight.device_mesh, weight.placements))
            module.bias.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()


def make_data(n, seed):
    gen = torch.Generator().manual_seed(seed)
    templates = torch.randn(CLASSES, TOKENS, 6, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (n,), generator=gen)
    gain = 0.5 + torch.rand(n, 1, 1, generator=gen)
    return gain * templates[labels] + 1.2 * torch.randn(n, TOKENS, 6, generator=gen), labels


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    with torch.device("meta"):
        model = Mixer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    init_weights(model, seed=12)

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    x, y = make_data(768, seed=1)
    test_x, test_y = make_data(200, seed=2)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(2)
        for chunk in order.split(64):
            mine = chunk[rank::world]
            loss = F.cross_entropy(model(x[mine]), y[mine], label_smoothing=0.05)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += torch.stack([loss.detach() * len(mine), torch.tensor(float(len(mine)))])
        dist.all_reduce(total)
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0].item() / total[1].item():.10f} accuracy {accuracy:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
