"""Graph regression on random molecules; training goes from small graphs to large ones."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

KINDS, LARGEST, GRAPHS = 5, 12, 320
BATCH = 16


class MessageLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, width)
        self.neighbours = nn.Linear(width, width, bias=False)

    def forward(self, h, bonds):
        return h + torch.relu(self.own(h) + self.neighbours(bonds @ h))


class GraphNet(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.atoms = nn.Embedding(KINDS, width)
        self.layers = nn.ModuleList(MessageLayer(width) for _ in range(3))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, kinds, bonds, present):
        h = self.atoms(kinds)
        for layer in self.layers:
            h = layer(h, bonds)
        pooled = (h * present[..., None]).sum(1) / present.sum(1, keepdim=True)
        return self.readout(pooled).squeeze(-1)


def molecules():
    g = torch.Generator().manual_seed(61)
    sizes = torch.randint(3, LARGEST + 1, (GRAPHS,), generator=g)
    kinds = torch.randint(0, KINDS, (GRAPHS, LARGEST), generator=g)
    present = (torch.arange(LARGEST) < sizes[:, None]).double()
    edges = (torch.rand(GRAPHS, LARGEST, LARGEST, generator=g) < 0.3).double().triu(1)
    bonds = (edges + edges.transpose(1, 2)) * present[:, :, None] * present[:, None, :]
    degree = bonds.sum(-1, keepdim=True).clamp(min=1)
    charge = torch.tensor([0.2, -0.5, 0.9, -1.1, 0.4])[kinds] * present
    target = torch.einsum("gi,gij,gj->g", charge, bonds, charge) + 0.1 * sizes
    return sizes, kinds, bonds / degree, present, target


class SizeCurriculum:
    """Indices of one process: the smallest share of the graphs, from small to large."""

    def __init__(self, sizes, rank, world):
        self.order = torch.argsort(sizes, stable=True)
        self.rank, self.world = rank, world

    def batches(self, share, size):
        count = int(len(self.order) * share) // BATCH * BATCH
        mine = self.order[:count].chunk(self.world)[self.rank]
        return mine.split(size)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    sizes, kinds, bonds, present, target = molecules()
    torch.manual_seed(3)
    model = DDP(GraphNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    curriculum = SizeCurriculum(sizes, rank, world)

    for epoch, share in enumerate((0.4, 0.7, 1.0)):
        total = torch.zeros(2)
        for rows in curriculum.batches(share, BATCH // world):
            predicted = model(kinds[rows], bonds[rows], present[rows])
            loss = nn.functional.smooth_l1_loss(predicted, target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(rows), len(rows)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"stage {epoch}: {int(total[1])} graphs, loss {total[0] / total[1]:.8f}")
    if rank == 0:
        print(f"atom embedding norm {model.module.atoms.weight.norm().item():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
