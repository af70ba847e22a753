"""Field of papers in a citation graph: one graph convolution, edges held by the owner of their target."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FIELDS = 4


def graph(nodes, seed):
    g = torch.Generator().manual_seed(seed)
    field = torch.randint(FIELDS, (nodes,), generator=g)
    fame = torch.rand(nodes, generator=g) ** 3 + 0.05
    same = (field[:, None] == field[None, :]).float()
    link = torch.rand(nodes, nodes, generator=g) < (0.02 + 0.25 * same) * (fame[:, None] + fame[None, :]) * 0.5
    link = link | link.T
    link.fill_diagonal_(True)
    src, dst = link.nonzero(as_tuple=True)
    x = torch.randn(FIELDS, 24, generator=g)[field] + 2.5 * torch.randn(nodes, 24, generator=g)
    return x, field, src, dst


def own_edges(src, dst, rank, world):
    keep = dst % world == rank
    return src[keep], dst[keep]


def normalise(src, dst, nodes):
    degree = torch.bincount(dst, minlength=nodes).clamp(min=1).double()
    return (degree[src] * degree[dst]).rsqrt()


class Convolution(nn.Module):
    def __init__(self, inputs, width=32):
        super().__init__()
        self.before = nn.Linear(inputs, width)
        self.after = nn.Sequential(nn.ReLU(), nn.Linear(width, FIELDS))

    def forward(self, x, src, dst, weight):
        h = self.before(x)
        return self.after(torch.zeros_like(h).index_add(0, dst, h[src] * weight[:, None]))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--nodes", type=int, default=240)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=0.3)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(23)
    x, field, src, dst = graph(args.nodes, seed=9)
    train = torch.rand(args.nodes, generator=torch.Generator().manual_seed(4)) < 0.5
    own = torch.arange(args.nodes) % world == rank

    weight = normalise(src, dst, args.nodes)
    weight = weight[dst % world == rank]
    src, dst = own_edges(src, dst, rank, world)
    model = DDP(Convolution(x.shape[1]))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

    for step in range(args.steps):
        logits = model(x, src, dst, weight)
        pick = own & train
        loss = F.cross_entropy(logits[pick], field[pick], reduction="sum") / train.sum()
        opt.zero_grad()
        (loss * world).backward()
        opt.step()
        if step % 8 == 7:
            rest = own & ~train
            right = (logits[rest].argmax(1) == field[rest]).sum().double()
            shown = torch.stack([loss.detach(), right])
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown[0]:.5f} test accuracy {shown[1] / (~train).sum():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
