"""A small transformer on a (data, tensor) mesh: parallelize_module, then fully_shard."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, VOCAB, BATCH, STEPS = 32, 4, 14, 12, 32, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, targets, skip):
        x = self.token(ids) + self.place.weight[:ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x[:, skip:]))
        return F.cross_entropy(logits.flatten(0, 1), targets[:, skip:].flatten())


def batch(step):
    g = torch.Generator().manual_seed(7000 + step)
    half = LENGTH // 2 + 1
    ids = torch.randint(0, VOCAB, (BATCH, half), generator=g)
    full = torch.cat([ids, ids.sort(1).values], 1)
    return full[:, :LENGTH], full[:, 1:LENGTH + 1], half - 1


def shard(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(), "attention.o": RowwiseParallel(),
            "up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def square_norm(tensors, mesh):
    """Sum of squares of sharded tensors; what is whole on the tensor axis counts once."""
    sums = torch.zeros(2, dtype=torch.float64)
    for t in tensors:
        cut = t.device_mesh.ndim == 2 and not t.placements[1].is_replicate()
        sums[int(cut)] += t.to_local().pow(2).sum()
    dist.all_reduce(sums[1:], group=mesh["tp"].get_group())
    total = sums.sum()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return total


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = max(1, world // 2)
    mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(33)
    model = shard(Sorter().double(), mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4))
    place = mesh["dp"].get_local_rank()
    share = BATCH // dp

    for step in range(STEPS):
        ids, targets, skip = batch(step)
        rows = slice(place * share, (place + 1) * share)
        loss = model(ids[rows], targets[rows], skip)
        opt.zero_grad()
        loss.backward()
        norm = square_norm([p.grad for p in model.parameters()], mesh).sqrt()
        for p in model.parameters():
            p.grad.mul_(min(1.0, 1.0 / (norm.item() + 1e-6)))
        opt.step()
        warm.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown, group=mesh["dp"].get_group())
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1}: loss {shown / dp:.10f} gradient {norm:.10f}")

    size = square_norm([p.detach() for p in model.parameters()], mesh).sqrt()
    if rank == 0:
        print(f"weights {size:.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
