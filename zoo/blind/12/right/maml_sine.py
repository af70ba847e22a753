"""Second-order MAML (with learned inner rates) on sine waves; the tasks of a meta-batch are shared out."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

TASKS, SHOTS, INNER, META_STEPS = 12, 8, 2, 40


def task(key, shots=SHOTS):
    """Support and query points of one sine wave."""
    g = torch.Generator().manual_seed(key)
    amplitude, phase = 0.5 + 2 * torch.rand(1, generator=g), math.pi * torch.rand(1, generator=g)
    x = torch.rand(2 * shots, 1, generator=g) * 8 - 4
    y = amplitude * torch.sin(x + phase)
    return (x[:shots], y[:shots]), (x[shots:], y[shots:])


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_rate = nn.ParameterList(nn.Parameter(torch.full_like(p, math.log(0.03))) for p in self.net.parameters())

    def adapt(self, support, create_graph):
        weights = dict(self.net.named_parameters())
        for _ in range(INNER):
            loss = F.mse_loss(functional_call(self.net, weights, (support[0],)), support[1])
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)
            weights = {k: w - r.exp() * g for (k, w), r, g in zip(weights.items(), self.log_rate, grads)}
        return weights

    def query_loss(self, key, create_graph=True):
        support, query = task(key)
        weights = self.adapt(support, create_graph)
        return F.mse_loss(functional_call(self.net, weights, (query[0],)), query[1])


class MetaTrainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(rank)
        self.learner = Learner()
        self.params = list(self.learner.parameters())
        if world > 1:
            for p in self.params:
                dist.broadcast(p.data, 0)
        self.optimizer = torch.optim.Adam(self.params, lr=4e-3, eps=1e-5)

    def meta_step(self, step):
        sums = [torch.zeros_like(p) for p in self.params]
        value = torch.zeros(1)
        for k in range(self.rank, TASKS, self.world):
            loss = self.learner.query_loss(step * TASKS + k)
            for s, g in zip(sums, torch.autograd.grad(loss, self.params)):
                s += g
            value += loss.detach()
        flat = torch.cat([t.flatten() for t in sums] + [value])
        if self.world > 1:
            dist.all_reduce(flat)
        flat /= TASKS
        offset = 0
        for p in self.params:
            p.grad = flat[offset: offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        nn.utils.clip_grad_norm_(self.params, 2.0)
        self.optimizer.step()
        return flat[-1].item()

    def evaluate(self, count=30):
        losses = torch.zeros(count)
        for k in range(count)[self.rank::self.world]:
            losses[k] = self.learner.query_loss(10 ** 6 + k, create_graph=False).detach()
        if self.world > 1:
            dist.all_reduce(losses)
        return losses.mean().item(), losses.median().item()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    trainer = MetaTrainer(rank, world)
    for step in range(META_STEPS):
        loss = trainer.meta_step(step)
        if step % 10 == 9:
            mean, median = trainer.evaluate()
            if rank == 0:
                print(f"step {step} meta loss {loss:.4f} held-out mean {mean:.4f} median {median:.4f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
