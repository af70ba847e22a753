"""Diabetes progression from four clinics: the model travels, the patients' data stay.

The model visits the clinics in turn, with its optimizer's memory in the luggage, and is trained on one batch at each stop.
A site hosts one or more clinics; a site's own copy is out of date while the model is elsewhere.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes

CLINICS, ROUNDS, BATCH = 4, 12, 24


class Clinic:
    """Patients of one age group."""

    def __init__(self, number):
        x, y = load_diabetes(return_X_y=True)
        x = torch.tensor(x / x.std(0), dtype=torch.float32)
        y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
        group = torch.argsort(x[:, 0], stable=True).tensor_split(CLINICS)[number]
        self.x, self.y, self.test = x[group[:-20]], y[group[:-20]], (x[group[-20:]], y[group[-20:]])
        self.dice = torch.Generator().manual_seed(10 * number + 1)
        self.queue = torch.empty(0, dtype=torch.long)

    def batch(self):
        if len(self.queue) < BATCH:
            self.queue = torch.randperm(len(self.x), generator=self.dice)
        rows, self.queue = self.queue[:BATCH], self.queue[BATCH:]
        return self.x[rows], self.y[rows]


class Traveller:
    def __init__(self):
        torch.manual_seed(55)
        self.net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.85, weight_decay=1e-3)
        for p in self.net.parameters():
            self.opt.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def luggage(self):
        ps = list(self.net.parameters())
        return [p.data for p in ps] + [self.opt.state[p]["momentum_buffer"] for p in ps]

    def pack(self):
        return torch.cat([t.reshape(-1) for t in self.luggage()])

    def unpack(self, flat):
        things = self.luggage()
        for t, f in zip(things, flat.split([t.numel() for t in things])):
            t.copy_(f.view_as(t))

    def visit(self, clinic, lr):
        for group in self.opt.param_groups:
            group["lr"] = lr
        x, y = clinic.batch()
        loss = nn.functional.smooth_l1_loss(self.net(x).squeeze(1), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


def main():
    site, sites = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if sites > 1:
        dist.init_process_group("gloo")
    home = {c: c * sites // CLINICS for c in range(CLINICS)}
    clinics = {c: Clinic(c) for c in range(CLINICS) if home[c] == site}
    model = Traveller()
    parcel = torch.empty_like(model.pack())
    losses = torch.zeros(ROUNDS, CLINICS)

    here = home[0]
    for stop in range(ROUNDS * CLINICS):
        round_no, c = divmod(stop, CLINICS)
        if home[c] != here:
            if site == here:
                dist.send(model.pack(), home[c])
            elif site == home[c]:
                dist.recv(parcel, here)
                model.unpack(parcel)
            here = home[c]
        if site == here:
            losses[round_no, c] = model.visit(clinics[c], lr=0.05 * (1 - stop / (ROUNDS * CLINICS)))

    parcel.copy_(model.pack())
    if sites > 1:
        dist.broadcast(parcel, src=here)
        dist.all_reduce(losses)
    model.unpack(parcel)

    with torch.no_grad():
        squares = torch.zeros(CLINICS, dtype=torch.float64)
        for c, clinic in clinics.items():
            x, y = clinic.test
            squares[c] = ((model.net(x).squeeze(1) - y) ** 2).double().mean()
    if sites > 1:
        dist.all_reduce(squares)
    if site == 0:
        for r in range(1, ROUNDS, 3):
            print(f"round {r}: " + "  ".join(f"{v:.6f}" for v in losses[r].tolist()), flush=True)
        print("rmse by clinic " + " ".join(f"{v:.5f}" for v in squares.sqrt().tolist())
              + f"   over all {squares.mean().sqrt().item():.6f}", flush=True)
    if sites > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
