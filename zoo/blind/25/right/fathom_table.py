"""Breast-cancer screening by logistic regression, trained with SAGA.

SAGA keeps the last gradient coefficient of every patient.  A worker stores only the records and the
coefficients of its own patients (clinic = record number modulo the number of workers); a step's
patients are drawn for all workers alike, and each worker treats those that it stores.
"""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer


class Clinic:
    """The part of the table that this worker keeps."""

    def __init__(self, features, labels, rank, world):
        self.rank, self.world = rank, world
        self.x = features[rank::world].contiguous()
        self.y = labels[rank::world].contiguous()
        self.coef = torch.zeros(len(self.y))

    def mine(self, drawn):
        return [i // self.world for i in drawn.tolist() if i % self.world == self.rank]

    def visit(self, model, drawn):
        """Returns sum of (new - old) * x over the patients drawn, and how many are here."""
        here = self.mine(drawn)
        delta = torch.zeros(self.x.shape[1])
        if here:
            idx = torch.tensor(here)
            z = model(self.x[idx]).squeeze(1)
            new = torch.sigmoid(z) - self.y[idx]
            delta = (new - self.coef[idx]) @ self.x[idx]
            self.coef[idx] = new
        return delta, len(here)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    y = torch.tensor(data.target, dtype=torch.float32)
    n = len(x)
    clinic = Clinic(x, y, rank, world)

    torch.manual_seed(1)
    model = torch.nn.Linear(31, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    table_mean = torch.zeros(31)
    gen = torch.Generator().manual_seed(8)
    busiest = 0

    with torch.no_grad():
        for step in range(60):
            drawn = torch.randperm(n, generator=gen)[:6]
            delta, count = clinic.visit(model, drawn)
            busiest = max(busiest, count)
            dist.all_reduce(delta)
            model.weight.grad = (delta / len(drawn) + table_mean)[None]
            table_mean += delta / n
            opt.step()
            if step % 15 == 14:
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    model(clinic.x).squeeze(1), clinic.y, reduction="sum")
                dist.all_reduce(loss)
                if rank == 0:
                    print(f"step {step + 1} loss {loss.item() / n:.6f}", flush=True)

        hits = ((model(clinic.x).squeeze(1) > 0) == (clinic.y > 0.5)).sum()
        filled = (clinic.coef != 0).sum()
        out = torch.stack([hits, filled])
        dist.all_reduce(out)
    if rank == 0:
        print(f"most patients of one step at worker 0: {busiest}")
        print(f"accuracy {out[0].item() / n:.4f}, table filled {out[1].item()} of {n}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
