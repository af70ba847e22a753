"""Three tasks on one trunk (depth, slope and kind of a small patch of terrain).

The tasks pull the trunk in conflicting directions, so their gradients are combined by PCGrad:
each task's gradient loses its component along those of the other tasks that it conflicts with,
then the results are added up.
"""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 48


def terrain(n, seed):
    g = torch.Generator().manual_seed(seed)
    patch = torch.randn(n, 24, generator=g)
    mix = torch.randn(24, 3, generator=torch.Generator().manual_seed(77)) / 24 ** 0.5
    h = patch @ mix
    depth = torch.sin(2 * h[:, 0]) + 0.3 * h[:, 1]
    slope = -torch.sin(2 * h[:, 0]) * (h[:, 1] > 0) + 0.4 * h[:, 2]
    kind = (h[:, 0] > 0).long() + (h[:, 2] > 0.3).long()
    noise = 0.1 * torch.randn(n, 2, generator=g)
    return TensorDataset(patch, depth + noise[:, 0], slope + noise[:, 1], kind)


class Terrain(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.depth, self.slope, self.kind = nn.Linear(width, 1), nn.Linear(width, 1), nn.Linear(width, 3)

    def losses(self, patch, depth, slope, kind):
        h = self.trunk(patch)
        return [F.mse_loss(self.depth(h)[:, 0], depth),
                2.0 * F.smooth_l1_loss(self.slope(h)[:, 0], slope),
                F.cross_entropy(self.kind(h), kind)]


def flat_gradient(loss, params):
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(params, grads)])


def average(vector):
    dist.all_reduce(vector)
    return vector.div_(dist.get_world_size())


def surgery(grads, order):
    """Project every gradient onto the normal plane of those that it conflicts with."""
    result = torch.zeros_like(grads[0])
    for i, own in enumerate(grads):
        g = own.clone()
        others = [j for j in range(len(grads)) if j != i]
        order.shuffle(others)
        for j in others:
            dot = g @ grads[j]
            if dot < 0:
                g -= dot / grads[j].square().sum() * grads[j]
        result += g
    return result


def assign(params, vector):
    for p, piece in zip(params, vector.split([p.numel() for p in params])):
        p.grad = piece.view_as(p).clone()


def main():
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29615")):
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    train = terrain(384, seed=1)
    sampler = DistributedSampler(train, seed=8)
    loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    torch.manual_seed(3)
    net = Terrain()
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.08, momentum=0.9)
    order = random.Random(5)

    for epoch in range(6):
        sampler.set_epoch(epoch)
        seen = torch.zeros(3)
        for batch in loader:
            losses = net.losses(*batch)
            grads = [average(flat_gradient(loss, params)) for loss in losses]
            assign(params, surgery(grads, order))
            optimizer.step()
            seen += torch.stack([loss.detach() for loss in losses])
        seen = average(seen) / len(loader)
        if rank == 0:
            print(f"epoch {epoch} depth {seen[0]:.5f} slope {seen[1]:.5f} kind {seen[2]:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
