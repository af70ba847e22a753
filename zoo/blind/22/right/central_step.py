"""Diabetes progression quantiles with a central server.

Process 0 owns the data, the optimizer and the schedule.  In every step it hands out the rows, collects the
gradients, updates the weights and sends them back; the other processes only compute.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes

QUANTILES = torch.tensor([0.1, 0.5, 0.9])
BATCH, FEATURES = 64, 10
CONTINUE, STOP = 0, 1


def pinball(pred, y):
    gap = y.unsqueeze(1) - pred
    return torch.maximum(QUANTILES * gap, (QUANTILES - 1) * gap).sum()


class Link:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.many = self.size > 1
        if self.many:
            dist.init_process_group("gloo")

    def hand_out(self, batch):
        """Process 0 passes a [BATCH, FEATURES + 1] tensor, the others None."""
        if not self.many:
            return batch
        part = torch.empty(BATCH // self.size, FEATURES + 1)
        dist.scatter(part, list(batch.chunk(self.size)) if self.rank == 0 else None, src=0)
        return part

    def collect(self, model):
        if self.many:
            for p in model.parameters():
                dist.reduce(p.grad, dst=0)

    def publish(self, model):
        if self.many:
            for p in model.parameters():
                dist.broadcast(p.data, src=0)

    def decide(self, flag):
        if not self.many:
            return flag
        box = torch.tensor([flag])
        dist.broadcast(box, src=0)
        return int(box)


class Server:
    def __init__(self, model):
        raw = load_diabetes()
        order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(6))
        rows = torch.tensor(raw.data, dtype=torch.float32)[order] / 0.0476
        y = torch.tensor(raw.target, dtype=torch.float32)[order]
        y = (y - y[:320].mean()) / y[:320].std()
        table = torch.cat([rows, y.unsqueeze(1)], 1)
        self.train, self.valid = table[:320], table[320:]
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.3, patience=1)
        self.best, self.bad, self.best_weights = float("inf"), 0, None

    def batches(self, epoch):
        perm = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(1000 + epoch))
        return self.train[perm].split(BATCH)

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()

    @torch.no_grad()
    def judge(self, epoch):
        x, y = self.valid[:, :-1], self.valid[:, -1]
        pred = self.model(x)
        score = pinball(pred, y).item() / len(y)
        self.plateau.step(score)
        inside = ((y >= pred[:, 0]) & (y <= pred[:, 2])).float().mean()
        print(f"epoch {epoch} pinball {score:.5f} coverage {inside:.3f} lr {self.opt.param_groups[0]['lr']:.1e}")
        if score < self.best:
            self.best, self.bad = score, 0
            self.best_weights = [p.clone() for p in self.model.parameters()]
            return CONTINUE
        self.bad += 1
        return STOP if self.bad >= 4 else CONTINUE

    @torch.no_grad()
    def restore(self):
        for p, w in zip(self.model.parameters(), self.best_weights):
            p.copy_(w)
        print(f"best pinball {self.best:.5f}")


def main():
    link = Link()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))
    server = Server(model) if link.rank == 0 else None
    link.publish(model)

    for epoch in range(20):
        batches = iter(server.batches(epoch)) if server else None
        for _ in range(320 // BATCH):
            part = link.hand_out(next(batches) if server else None)
            model.zero_grad()
            (pinball(model(part[:, :-1]), part[:, -1]) / BATCH).backward()
            link.collect(model)
            if server:
                server.update()
            link.publish(model)
        if link.decide(server.judge(epoch) if server else CONTINUE) == STOP:
            break
    if server:
        server.restore()
    link.publish(model)
    if link.many:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
