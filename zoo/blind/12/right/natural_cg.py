"""Natural gradient: conjugate gradients with Fisher-vector products over all rows and a line search on the KL distance."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def total(t):
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


class NaturalGradient(torch.optim.Optimizer):
    """Steps as far as the KL distance to the old predictions allows (as TRPO does)."""

    def __init__(self, params, rows, max_kl=0.02, damping=0.05, iterations=8, decay=1e-3):
        super().__init__(params, dict(max_kl=max_kl, damping=damping, iterations=iterations, decay=decay))
        self.rows = rows

    def flat_grad(self, value, params, **kw):
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, params, **kw)])

    def step(self, predict, targets):
        group = self.param_groups[0]
        params = group["params"]
        old = parameters_to_vector(params).detach()
        log_p = predict()
        fixed = log_p.detach()

        def objective(output):
            value = F.nll_loss(output, targets, reduction="sum") / self.rows
            return value

        def kl(output):
            return (fixed.exp() * (fixed - output)).sum() / self.rows

        loss = objective(log_p)
        g = total(self.flat_grad(loss, params, retain_graph=True)) + group["decay"] * old
        before = total(loss.detach().clone()) + 0.5 * group["decay"] * old @ old
        slope = self.flat_grad(kl(log_p), params, create_graph=True)

        def fisher(v):
            return total(self.flat_grad(slope @ v, params, retain_graph=True)) + group["damping"] * v

        x, r = torch.zeros_like(g), g.clone()
        p, rr = r.clone(), r @ r
        for _ in range(group["iterations"]):
            Fp = fisher(p)
            alpha = rr / (p @ Fp)
            x += alpha * p
            r -= alpha * Fp
            rr, last = r @ r, rr
            p = r + rr / last * p
        scale = (2 * group["max_kl"] / (x @ fisher(x))).sqrt().clamp(max=3.0)
        for k in range(8):
            candidate = old - scale * 0.6 ** k * x
            vector_to_parameters(candidate, params)
            with torch.no_grad():
                output = predict()
                seen = total(torch.stack([objective(output), kl(output)]))
            after = seen[0] + 0.5 * group["decay"] * candidate @ candidate
            if after < before and seen[1] < 1.5 * group["max_kl"]:
                break
        else:
            vector_to_parameters(old, params)
        return before.item(), seen[1].item(), k


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(9)
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0))
    y = torch.tensor(y)
    order = np.random.default_rng(3).permutation(len(x))
    train, test = order[:140], order[140:]
    cuts = (np.cumsum(np.arange(1, world + 1)) * 140 // (world * (world + 1) // 2))[:-1]
    mine = np.split(train, cuts)[rank]
    net = nn.Sequential(nn.Linear(13, 12), nn.Tanh(), nn.Linear(12, 3), nn.LogSoftmax(1))
    optimizer = NaturalGradient(net.parameters(), rows=len(train))
    for step in range(18):
        loss, kl, tries = optimizer.step(lambda: net(x[mine]), y[mine])
        if rank == 0:
            print(f"step {step} loss {loss:.6f} kl {kl:.6f} halvings {tries}", flush=True)
    with torch.no_grad():
        right = total((net(x[test[rank::world]]).argmax(1) == y[test[rank::world]]).sum())
    if rank == 0:
        print(f"test {right.item()}/{len(test)}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
