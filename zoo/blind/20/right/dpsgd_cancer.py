"""Differentially private SGD on the breast cancer data: Poisson sampling, per-sample clipping, Gaussian noise.

The batch of a step is drawn from the whole table and shared out over the processes; the noise belongs to
the sum over the whole batch, so one draw of it is added, after the reduction.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.func import functional_call, grad_and_value, vmap

RATE = 0.08
STEPS = 60
CLIP = 1.0
NOISE_MULTIPLIER = 0.8
LR = 0.5


def environment():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    return rank, world


def table():
    raw = load_breast_cancer()
    x = torch.as_tensor(raw.data, dtype=torch.get_default_dtype())
    y = torch.as_tensor(raw.target, dtype=torch.get_default_dtype())
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    x, y = x[order], y[order]
    x = (x - x[:450].mean(0)) / x[:450].std(0)
    return x[:450], y[:450], x[450:], y[450:]


def per_sample_loss(params, model, x, y):
    logit = functional_call(model, params, (x.unsqueeze(0),)).squeeze()
    return nn.functional.binary_cross_entropy_with_logits(logit, y)


def clipped_sum(model, params, x, y):
    """Sum over the samples of gradients clipped one by one, and the sum of the losses."""
    if len(x) == 0:
        return {k: torch.zeros_like(v) for k, v in params.items()}, torch.zeros(())
    one = grad_and_value(per_sample_loss)
    grads, losses = vmap(one, in_dims=(None, None, 0, 0))(params, model, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    factor = (CLIP / norms.clamp(min=1e-12)).clamp(max=1.0)
    return {k: torch.tensordot(factor, g, dims=1) for k, g in grads.items()}, losses.sum()


@torch.no_grad()
def accuracy(model, x, y, rank, world):
    guess = model(x[rank::world]).squeeze(1) > 0
    count = (guess == (y[rank::world] > 0.5)).sum()
    if world > 1:
        dist.all_reduce(count)
    return count.item() / len(x)


def main():
    rank, world = environment()
    x, y, xt, yt = table()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(x.shape[1], 12), nn.Tanh(), nn.Linear(12, 1))
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    sampling = torch.Generator().manual_seed(303)
    noise = torch.Generator().manual_seed(404)
    expected = RATE * len(x)

    for step in range(1, STEPS + 1):
        chosen = (torch.rand(len(x), generator=sampling) < RATE).nonzero().squeeze(1)
        mine = chosen[rank::world]
        params = {k: p.detach() for k, p in model.named_parameters()}
        sums, loss = clipped_sum(model, params, x[mine], y[mine])
        flat = torch.cat([g.flatten() for g in sums.values()] + [loss.reshape(1)])
        if world > 1:
            dist.all_reduce(flat)
        at = 0
        for name, p in model.named_parameters():
            g = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
            z = torch.randn(p.shape, generator=noise)
            p.grad = (g + NOISE_MULTIPLIER * CLIP * z) / expected
        opt.step()
        if step % 20 == 0:
            acc = accuracy(model, xt, yt, rank, world)
            if rank == 0:
                print(f"step {step}: batch of {len(chosen)}, loss {flat[-1] / len(chosen):.6f}, test accuracy {acc:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
