import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 64
STEPS = 80


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=48, depth=2):
        super().__init__()
        self.stem = nn.Linear(64, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29811").items():
        os.environ.setdefault(key, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = load_digits()
    x = torch.tensor(data.data / 16.0, dtype=torch.float32)
    y = torch.tensor(data.target)
    x_train, y_train, x_test, y_test = x[:1437], y[:1437], x[1437:], y[1437:]

    # two processes per node, one node if there are fewer than four
    per_node = 2 if world >= 4 else 1
    mesh = init_device_mesh("cpu", (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(3)
    model = Net()
    shard_mesh = mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=shard_mesh)
    fully_shard(model, mesh=shard_mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

    gen = torch.Generator().manual_seed(11)
    local = BATCH // world
    for step in range(STEPS):
        rows = torch.randint(len(x_train), (BATCH,), generator=gen)[rank * local:(rank + 1) * local]
        loss = F.cross_entropy(model(x_train[rows]), y_train[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 19:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.5f}")

    model.eval()
    with torch.no_grad():
        logits = model(x_test)
    if rank == 0:
        acc = (logits.argmax(1) == y_test).float().mean()
        print(f"test loss {F.cross_entropy(logits, y_test):.5f} accuracy {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
