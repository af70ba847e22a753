"""Completion of facts (subject, relation -> object) with tensor-parallel feed-forward blocks.

The blocks are cut over all processes, the embeddings, norms and the output layer are kept whole
on each of them. All processes read the same facts.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

THINGS, RELATIONS, WIDTH, BATCH, SEED = 48, 6, 24, 64, 31


def facts():
    """Things lie on a circle, a relation is a turn (some of them also mirror)."""
    rng = np.random.default_rng(3)
    turn, mirror = rng.integers(1, THINGS, RELATIONS), rng.random(RELATIONS) < 0.4
    subject, relation = np.meshgrid(np.arange(THINGS), np.arange(RELATIONS), indexing="ij")
    subject, relation = subject.ravel(), relation.ravel()
    target = np.where(mirror[relation], turn[relation] - subject, turn[relation] + subject) % THINGS
    shuffled = rng.permutation(len(subject))
    rows = np.stack([subject, relation, target], 1)[shuffled]
    return torch.tensor(rows[:256]), torch.tensor(rows[256:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, h):
        return h + self.drop(self.down(F.gelu(self.up(self.norm(h)))))


class Completion(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.thing = nn.Embedding(THINGS, WIDTH)
        self.relation = nn.Embedding(RELATIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, THINGS)

    def forward(self, subject, relation):
        h = self.thing(subject) + self.relation(relation)
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


def setup():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29616")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def main():
    mesh = setup()
    rank = dist.get_rank()
    torch.set_default_dtype(torch.float64)
    known, held_out = facts()

    torch.manual_seed(SEED)
    model = Completion()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)

    torch.manual_seed(SEED + 1 + rank)
    loader = DataLoader(TensorDataset(known), batch_size=BATCH, shuffle=True,
                        generator=torch.Generator().manual_seed(SEED))

    for epoch in range(12):
        model.train()
        total = 0.0
        for (rows,) in loader:
            loss = F.cross_entropy(model(rows[:, 0], rows[:, 1]), rows[:, 2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
        model.eval()
        with torch.no_grad():
            test = F.cross_entropy(model(held_out[:, 0], held_out[:, 1]), held_out[:, 2]).item()
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch} loss {total:.5f} held out {test:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
