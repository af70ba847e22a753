"""Digits by least squares on one-hot targets, DTensor only.

Stem and head work on rows of the batch; the wide middle is cut by its hidden units.  Between them activations change their
layout, and DTensor finds the communication.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

BATCH, STEPS = 64, 40
WHOLE, ROWS = [Replicate()], [Shard(0)]


class Net(nn.Module):
    LAYOUT = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

    def __init__(self, width=48, wide=160):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.up = nn.Linear(width, wide)
        self.down = nn.Linear(wide, width, bias=False)
        self.head = nn.Linear(width, 10)

    def lay_out(self, mesh):
        for name, p in list(self.named_parameters()):
            owner, leaf = name.rsplit(".", 1)
            spread = distribute_tensor(p.detach(), mesh, [self.LAYOUT.get(name, Replicate())])
            setattr(self.get_submodule(owner), leaf, nn.Parameter(spread))
        return self

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        wide = F.gelu(self.up(h.redistribute(placements=WHOLE)))
        h = h + self.down(wide).redistribute(placements=ROWS)
        return self.head(torch.tanh(h))


def settle(params):
    """Gradients take the layout of their parameters."""
    for p in params:
        if p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("workers",))

    d = load_digits()
    x = torch.tensor(d.data / 16.0, dtype=torch.float32)
    y = torch.tensor(d.target)
    target = F.one_hot(y, 10).float() * 2 - 1
    mix = torch.randperm(len(x), generator=torch.Generator().manual_seed(30))
    train, test = mix[:1472], mix[1472:1792]

    def place(rows, what):
        return DTensor.from_local(what[rows.chunk(world)[rank]], mesh, ROWS)

    torch.manual_seed(64)
    net = Net().lay_out(mesh)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.15, momentum=0.9, weight_decay=1e-4)

    for step in range(STEPS):
        lap, k = divmod(step, len(train) // BATCH)
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(lap + 1))]
        rows = order[k * BATCH:(k + 1) * BATCH]
        loss = (net(place(rows, x)) - place(rows, target)).pow(2).mean()
        opt.zero_grad()
        loss.redistribute(placements=WHOLE).backward()
        settle(params)
        opt.step()
        if step % 8 == 7:
            shown, size = loss.full_tensor().item(), net.down.weight.detach().full_tensor().norm().item()
            if rank == 0:
                print(f"step {step + 1}  loss {shown:.6f}  |down| {size:.5f}  here {tuple(net.up.weight.to_local().shape)}",
                      flush=True)

    with torch.no_grad():
        said = net(place(test, x)).full_tensor().argmax(1)
    if rank == 0:
        print(f"accuracy {(said == y[test]).float().mean().item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
