"""Learns which left half of a digit belongs to which right half (InfoNCE with a bilinear score)."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class GatherRows(torch.autograd.Function):
    """Rows of all processes, in rank order."""

    @staticmethod
    def forward(ctx, z):
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class HalfEncoder(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, dim))


class Matcher(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.left, self.right = HalfEncoder(dim), HalfEncoder(dim)
        self.bilinear = nn.Parameter(torch.eye(dim))

    def forward(self, lefts, rights):
        a = F.normalize(self.left(lefts), dim=1)
        b = F.normalize(self.right(rights), dim=1)
        a, b = GatherRows.apply(a), GatherRows.apply(b)
        scores = a @ self.bilinear @ b.T * 8.0
        target = torch.arange(len(scores))
        loss = 0.5 * (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target))
        return loss, (scores.argmax(1) == target).float().mean()


def halves():
    images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    images = images - images.mean(0)
    return images[:, :, :4].flatten(1), images[:, :, 4:].flatten(1)


def loop(model, optimizer, args):
    rank, world = dist.get_rank(), dist.get_world_size()
    lefts, rights = halves()
    curve = []
    for step in range(args.steps):
        g = torch.Generator().manual_seed(1000 + step)
        rows = torch.randperm(len(lefts), generator=g)[:args.batch].view(world, -1)[rank]
        loss, hits = model(lefts[rows], rights[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} matched {hits.item():.3f}", flush=True)
    return curve


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(29)
    model = DDP(Matcher())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    curve = loop(model, optimizer, args)
    if dist.get_rank() == 0:
        print(f"last loss {curve[-1]:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
