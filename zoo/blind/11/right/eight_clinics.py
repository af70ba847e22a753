"""Federated averaging: eight clinics keep their rows, each trains for a while, then the models are averaged."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29850")

CLINICS, ROUNDS, LOCAL_STEPS = 8, 10, 2


class Clinic:
    def __init__(self, number, x, y):
        self.number, self.x, self.y = number, x, y

    def train(self, model, turn):
        local = copy.deepcopy(model)
        opt = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.5)
        g = torch.Generator().manual_seed(CLINICS * turn + self.number)
        for _ in range(LOCAL_STEPS):
            rows = torch.randint(len(self.x), (16,), generator=g)
            loss = F.binary_cross_entropy_with_logits(local(self.x[rows]).squeeze(1), self.y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        return local


def clinics_of(rank, world):
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target, dtype=torch.float32)
    order = x[:, 0].argsort(stable=True)
    cuts = [0, 30, 75, 140, 220, 310, 400, 480, len(x)]
    clinics = [Clinic(k, x[order[a:b]], y[order[a:b]]) for k, (a, b) in enumerate(zip(cuts, cuts[1:]))]
    return clinics[rank::world], len(x), x, y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    clinics, rows, x, y = clinics_of(rank, world)
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))
    for turn in range(ROUNDS):
        total = torch.zeros(sum(p.numel() for p in model.parameters()))
        for clinic in clinics:
            local = clinic.train(model, turn)
            total += len(clinic.x) / rows * nn.utils.parameters_to_vector(local.parameters()).detach()
        dist.all_reduce(total)
        with torch.no_grad():
            nn.utils.vector_to_parameters(total, model.parameters())
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        if rank == 0:
            print(f"round {turn}: loss {loss.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
