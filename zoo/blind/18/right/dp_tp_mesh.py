"""Next-symbol model on a two-dimensional mesh: rows of the batch over one axis, matrices over the other."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SYMBOLS, WIDTH, LENGTH, BATCH = 24, 32, 8, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS * SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) / WIDTH ** 0.25


def parallelise(net, mesh):
    parallelize_module(net, mesh["tp"], {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })
    for layer in net.layers:
        parallelize_module(layer, mesh["tp"], {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        })
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"], reshard_after_forward=True)


def overall_norm(tensors, tp):
    """Norm of sharded tensors taken together; what a tensor axis replicates counts once."""
    square = torch.zeros(())
    for t in tensors:
        copies = tp if t.placements[-1].is_replicate() else 1
        square += t.to_local().square().sum() / copies
    dist.all_reduce(square)
    return square.sqrt().item()


def sequences(n, seed):
    gen = torch.Generator().manual_seed(seed)
    s = torch.randint(0, SYMBOLS, (n, 2), generator=gen)
    for _ in range(LENGTH):
        new = (3 * s[:, -1] + s[:, -2] + torch.randint(0, 2, (n,), generator=gen)) % SYMBOLS
        s = torch.cat([s, new.unsqueeze(1)], 1)
    pair = s[:, :-1] * SYMBOLS + s[:, 1:]
    return pair[:, :-1], s[:, 2:]


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    tp = min(2, world)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    dp_rank, dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()

    torch.manual_seed(13)
    net = Net()
    parallelise(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, foreach=False)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)

    data = TensorDataset(*sequences(256, seed=1))
    sampler = DistributedSampler(data, num_replicas=dp_size, rank=dp_rank, shuffle=True, seed=7)
    loader = DataLoader(data, batch_size=BATCH // dp_size, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids, target in loader:
            loss = criterion(net(ids).flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = overall_norm([p.grad for p in net.parameters()], tp)
            for p in net.parameters():
                p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
            optimizer.step()
            scheduler.step()

    ids, target = sequences(96, seed=2)
    with torch.no_grad():
        logits = net(ids)
        loss = criterion(logits.flatten(0, 1), target.flatten())
        right = (logits.argmax(-1) == target).double().mean()
        norm = overall_norm(net.parameters(), tp)
    if dist.get_rank() == 0:
        print(f"test loss {loss.item():.10f}, accuracy {right.item():.6f}")
        print(f"weight norm {norm:.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
