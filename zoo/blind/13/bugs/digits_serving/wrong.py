"""Tensor-parallel MLP on digits; afterwards the weights are put together in one file for serving."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

HIDDEN, BLOCKS, BATCH, EPOCHS, LR = 64, 2, 64, 2, 0.05


class Copy(torch.autograd.Function):
    """Identity; gradients are added up over the processes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Add(torch.autograd.Function):
    """Adds up over the processes; gradients pass unchanged."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    def __init__(self, width, hidden, rank=0, world=1):
        super().__init__()
        up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(up.weight.detach().chunk(world, dim=0)[rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(world)[rank].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(world, dim=1)[rank].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        self.parallel = world > 1

    def forward(self, x):
        h = self.norm(x)
        h = F.gelu(F.linear(Copy.apply(h) if self.parallel else h, self.up, self.up_bias))
        y = F.linear(h, self.down)
        return x + (Add.apply(y) if self.parallel else y) + self.down_bias


def build(rank=0, world=1):
    torch.manual_seed(33)
    blocks = [Block(64, HIDDEN, rank, world) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.LayerNorm(64), nn.Linear(64, 10))


def whole_state(net, shapes):
    """Full tensors of a tensor-parallel network."""
    state = {}
    for name, p in net.state_dict().items():
        if p.shape != shapes[name]:
            flat = p.new_empty(shapes[name].numel())
            dist.all_gather(list(flat.chunk(dist.get_world_size())), p.flatten())
            p = flat.view(shapes[name])
        state[name] = p
    return state


def main():
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "serving.pt")
    digits = load_digits()
    x, y = torch.tensor(digits.data / 8.0 - 1.0), torch.tensor(digits.target)
    net = build(rank, world)
    opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)

    for epoch in range(EPOCHS):
        order = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            loss = F.cross_entropy(net(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} last loss {loss.item():.5f}")

    plain = build()
    state = whole_state(net, {n: p.shape for n, p in plain.state_dict().items()})
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    plain.load_state_dict(torch.load(path))
    with torch.no_grad():
        logits = plain(x[1280:])
    if rank == 0:
        print(f"served model: loss {F.cross_entropy(logits, y[1280:]):.5f} "
              f"accuracy {(logits.argmax(1) == y[1280:]).double().mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
