"""Cuisines from ingredients with DTensor tensor parallelism: a table of ingredients split by rows and gated
feed-forward blocks (SwiGLU) split by columns and rows. The batch is not split: all processes read the same recipes.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

INGREDIENTS, CUISINES, LENGTH, BATCH, EPOCHS = 64, 8, 7, 48, 4


def recipes(n, seed):
    g = torch.Generator().manual_seed(seed)
    taste = torch.randn(CUISINES, INGREDIENTS, generator=torch.Generator().manual_seed(0)).mul(1.5).softmax(1)
    cuisine = torch.randint(CUISINES, (n,), generator=g)
    return torch.multinomial(taste[cuisine], LENGTH, generator=g), cuisine


class SwiGLU(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.value(h))


class Cook(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.table = nn.Embedding(INGREDIENTS, width)
        self.blocks = nn.ModuleList(SwiGLU(width, 40) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, CUISINES)

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29625").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)                                             # plain parameters must start equal everywhere
    model = Cook()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    plan = {"table": RowwiseParallel(input_layouts=Replicate())}
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.gate": ColwiseParallel(), f"blocks.{i}.value": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    split = [p for p in model.parameters() if hasattr(p, "placements")]
    whole = [p for p in model.parameters() if not hasattr(p, "placements")]     # norms, head: not split, nothing to reduce

    x, y = recipes(480, 1)
    test_x, test_y = recipes(150, 2)
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, generator=torch.Generator().manual_seed(30))
    optimizers = [torch.optim.AdamW(split, lr=8e-3, eps=1e-6), torch.optim.AdamW(whole, lr=4e-3, eps=1e-6)]
    for epoch in range(EPOCHS):
        total = 0.0
        for rows, target in loader:
            loss = F.cross_entropy(model(rows), target)
            for o in optimizers:
                o.zero_grad()
            loss.backward()
            for o in optimizers:
                o.step()
            total += loss.item() / len(loader)
        with torch.no_grad():                                        # every process tests all rows
            out = model(test_x)
        if rank == 0:
            print(f"epoch {epoch} loss {total:.4f} test {F.cross_entropy(out, test_y):.4f} right {(out.argmax(1) == test_y).sum()} of {len(out)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
