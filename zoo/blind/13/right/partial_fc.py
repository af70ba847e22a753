"""Face-recognition style training with a class-parallel margin softmax (PartialFC).

The backbone is replicated; the class centres are cut over the processes, as with a million identities.
Features and labels of all processes meet in front of the centres.
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

IDENTITIES, PIXELS, WIDTH = 64, 48, 24
BATCH, STEPS, SCALE, MARGIN = 64, 45, 12.0, 0.25


class Gather(torch.autograd.Function):
    """Rows of all processes; backward adds up what every process wants of the own rows."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class SplitSoftmax(torch.autograd.Function):
    """Mean cross entropy of logits whose columns are split over the processes."""

    @staticmethod
    def forward(ctx, logits, labels, first):
        top = logits.max(1, keepdim=True).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        e = (logits - top).exp()
        below = e.sum(1, keepdim=True)
        dist.all_reduce(below)
        p = e / below
        here = ((labels >= first) & (labels < first + logits.shape[1])).nonzero().squeeze(1)
        mine = torch.zeros(len(labels))
        mine[here] = p[here, labels[here] - first]
        dist.all_reduce(mine)
        p[here, labels[here] - first] -= 1
        ctx.save_for_backward(p / len(labels))
        return -mine.clamp(min=1e-30).log().mean()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None, None


class CentresShard(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        every = torch.randn(IDENTITIES, WIDTH, generator=torch.Generator().manual_seed(9)) * 0.1
        self.first = rank * IDENTITIES // world
        self.weight = nn.Parameter(every.chunk(world)[rank].clone())

    def forward(self, features, labels):
        everyone = Gather.apply(features)
        tags = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(tags, labels)
        tags = torch.cat(tags)
        cosine = (F.normalize(everyone) @ F.normalize(self.weight).t()).clamp(-1 + 1e-6, 1 - 1e-6)
        target = torch.arange(self.first, self.first + len(self.weight))[None] == tags[:, None]
        with_margin = (cosine.acos() + MARGIN).clamp(max=math.pi).cos()
        return SplitSoftmax.apply(SCALE * torch.where(target, with_margin, cosine), tags, self.first)


def faces(per, seed):
    base = torch.randn(IDENTITIES, PIXELS, generator=torch.Generator().manual_seed(2))
    g = torch.Generator().manual_seed(seed)
    who = torch.arange(IDENTITIES).repeat(per)
    return base[who] + 0.8 * torch.randn(len(who), PIXELS, generator=g), who


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3 + rank)
    backbone = DDP(nn.Sequential(nn.Linear(PIXELS, 64), nn.PReLU(), nn.Linear(64, WIDTH)))
    centres = CentresShard(rank, world)
    opt = torch.optim.SGD([
        {"params": backbone.parameters()},
        {"params": centres.parameters(), "weight_decay": 0.0},
    ], lr=0.6, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, STEPS, power=2)
    x, y = faces(12, seed=3)
    order = torch.Generator().manual_seed(5)

    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=order).chunk(world)[rank]
        loss = centres(backbone(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in backbone.parameters():       # every process holds part of the one loss
                p.grad.mul_(world)
        opt.step()
        sched.step()
        if step % 9 == 8 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}")

    # verification on pairs: each process scores its own
    a, who = faces(2, seed=8)
    b, other = a.roll(-1, 0), who.roll(-1)
    b[::2], other[::2] = faces(2, seed=9)[0][::2], who[::2]
    with torch.no_grad():
        same = F.cosine_similarity(backbone.module(a[rank::world]), backbone.module(b[rank::world]))
    right = ((same > 0.5) == (who == other)[rank::world]).sum()
    norms = centres.weight.detach().norm(dim=1).sum()
    dist.all_reduce(right)
    dist.all_reduce(norms)
    if rank == 0:
        print(f"pairs right {right.item()} of {len(a)}, mean norm of a centre {norms.item() / IDENTITIES:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
