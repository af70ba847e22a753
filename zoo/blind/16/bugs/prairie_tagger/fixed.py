"""Tagging prairie plants from spectra: a tensor parallel feed-forward body and a class head split over the classes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_default_dtype(torch.float64)
BANDS, WIDTH, SPECIES = 20, 32, 12


def start():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


class SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose classes are spread over the processes."""

    @staticmethod
    def forward(ctx, logits, target, first):
        top = logits.max(1).values
        dist.all_reduce(top, dist.ReduceOp.MAX)
        exp = (logits - top[:, None]).exp()
        total = exp.sum(1)
        dist.all_reduce(total)
        here = (target >= first) & (target < first + logits.size(1))
        index = (target - first).clamp(0, logits.size(1) - 1)
        chosen = torch.where(here, logits.gather(1, index[:, None]).squeeze(1) - top, 0.0)
        dist.all_reduce(chosen)
        ctx.save_for_backward(exp / total[:, None], index, here)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, grad):
        probs, index, here = ctx.saved_tensors
        out = probs.clone()
        out[torch.arange(len(index)), index] -= here.to(out.dtype)
        return grad * out / len(index), None, None


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Tagger(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        rank, world = mesh.get_local_rank(), mesh.size()
        self.embed = nn.Linear(BANDS, WIDTH)
        self.body = parallelize_module(Body(), mesh, {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
        })
        head = torch.randn(SPECIES, WIDTH) / WIDTH**0.5
        self.head = nn.Parameter(head.chunk(world)[rank].clone())
        self.first = rank * SPECIES // world

    def forward(self, x):
        hidden = self.body(torch.tanh(self.embed(x)))
        return hidden.to_local(grad_placements=[Partial()]) @ self.head.T


def spectra(n, seed):
    g = torch.Generator().manual_seed(seed)
    peaks = torch.linspace(0, BANDS - 1, SPECIES)
    species = torch.randint(0, SPECIES, (n,), generator=g)
    bands = torch.arange(BANDS, dtype=torch.float64)
    curve = torch.exp(-((bands[None] - peaks[species][:, None]) ** 2) / 8)
    return curve + 0.25 * torch.randn(n, BANDS, generator=g), species


def main():
    mesh = start()
    rank = dist.get_rank()
    torch.manual_seed(21)
    model = Tagger(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, foreach=False)
    x, species = spectra(768, 4)
    g = torch.Generator().manual_seed(9)
    for epoch in range(5):
        total = 0.0
        for batch in torch.randperm(len(x), generator=g).split(48):
            loss = SplitCrossEntropy.apply(model(x[batch]), species[batch], model.first)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(batch)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(x):.8f}")
    xt, st = spectra(256, 5)
    with torch.no_grad():
        logits = model(xt)
        loss = SplitCrossEntropy.apply(logits, st, model.first)
    if rank == 0:
        print(f"test loss {loss:.8f} embed norm {model.embed.weight.norm():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
