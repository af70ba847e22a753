"""Energy per atom of small random alloys, with FSDP2.

The net is built on the meta device, sharded, and only then given memory and start values, so
that no process ever holds all of it.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SITES, KINDS, WIDTH, BLOCKS = 16, 3, 32, 3
BATCH, EPOCHS, SEED = 32, 5, 12


def alloys(n, seed):
    """Kinds of atoms on a ring of sites; neighbours and next neighbours interact."""
    g = torch.Generator().manual_seed(seed)
    bonds = torch.Generator().manual_seed(0)
    near, far = (torch.randn(KINDS, KINDS, generator=bonds) for _ in range(2))
    atoms = torch.randint(KINDS, (n, SITES), generator=g)
    energy = near[atoms, atoms.roll(1, 1)].mean(1) + 0.5 * far[atoms, atoms.roll(2, 1)].mean(1)
    return TensorDataset(nn.functional.one_hot(atoms, KINDS).float(), energy * 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3 * WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h):
        around = torch.cat([h.roll(1, 1), h, h.roll(-1, 1)], -1)
        return h + self.back(torch.relu(self.mix(around)))


class Alloy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(KINDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, atoms):
        h = self.embed(atoms)
        for block in self.blocks:
            h = block(h)
        return self.out(h).mean((1, 2))


@torch.no_grad()
def init_weights(model):
    """Normal weights with variance 1 / fan in (smaller in the way back), zero biases."""
    generator = torch.Generator().manual_seed(SEED)
    for name, p in model.named_parameters():
        local = p.to_local()
        if p.ndim == 1:
            local.zero_()
            continue
        std = p.shape[1] ** -0.5 * (0.3 if "back" in name else 1.0)
        local.normal_(0.0, std, generator=generator)


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29617")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    with torch.device("meta"):
        model = Alloy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model)

    train = alloys(256, seed=1)
    sampler = DistributedSampler(train, seed=4)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        squares = torch.zeros(())
        for atoms, energy in loader:
            loss = (model(atoms) - energy).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            squares += loss.detach() / len(loader)
        dist.all_reduce(squares)
        if rank == 0:
            print(f"epoch {epoch} squared error {squares.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
