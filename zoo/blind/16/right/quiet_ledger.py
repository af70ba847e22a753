"""Differentially private training (DP-SGD) of a tumour classifier.

Lots are drawn by Poisson sampling; each record's gradient is clipped, the clipped gradients
of all ranks are summed, and noise is added once to the sum.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.func import functional_call, grad, vmap

STEPS, RATE, CLIP, NOISE, LR = 40, 0.15, 1.0, 0.8, 0.4


def load():
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    x, y = x[order], y[order]
    mean, std = x[:455].mean(0), x[:455].std(0)
    x = ((x - mean) / std).clamp(-4, 4)
    return x[:455], y[:455], x[455:], y[455:]


def main():
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1

    x, y, test_x, test_y = load()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 2))
    params = dict(net.named_parameters())
    opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.5)

    def record_loss(weights, features, label):
        logits = functional_call(net, weights, (features.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, label.unsqueeze(0))

    per_record = vmap(grad(record_loss), in_dims=(None, 0, 0))
    lots = torch.Generator().manual_seed(17)
    noise = torch.Generator().manual_seed(1234)
    expected = RATE * len(x)

    for step in range(STEPS):
        taken = torch.rand(len(x), generator=lots) < RATE
        lot = taken.nonzero().flatten()
        mine = lot[rank::world]
        if len(mine):
            weights = {k: v.detach() for k, v in params.items()}
            grads = per_record(weights, x[mine], y[mine])
            squares = sum(g.flatten(1).pow(2).sum(1) for g in grads.values())
            factor = (CLIP / (squares.sqrt() + 1e-9)).clamp(max=1.0)
            sums = {k: torch.einsum("n,n...->...", factor, g) for k, g in grads.items()}
        else:
            sums = {k: torch.zeros_like(v) for k, v in params.items()}

        for name, p in params.items():
            total = sums[name].contiguous()
            if distributed:
                dist.all_reduce(total)
            total += NOISE * CLIP * torch.randn(p.shape, generator=noise)
            p.grad = total / expected
        opt.step()
        for group in opt.param_groups:
            group["lr"] = LR * (1 - (step + 1) / (STEPS + 1))

        if step % 10 == 9:
            score = torch.zeros(3, dtype=torch.float64)
            with torch.no_grad():
                part = slice(rank, None, world)
                logits = net(test_x[part])
                score[0] = nn.functional.cross_entropy(logits, test_y[part], reduction="sum")
                score[1] = (logits.argmax(1) == test_y[part]).sum()
                score[2] = len(logits)
            if distributed:
                dist.all_reduce(score)
            if rank == 0:
                loss, hits = (score[:2] / score[2]).tolist()
                print(f"step {step + 1}: lot {len(lot)} test loss {loss:.6f} accuracy {hits:.4f}")

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
