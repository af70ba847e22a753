"""Diabetes regression: the leader validates, lowers the rate, keeps the best weights and ends the run."""
import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Leader:
    def __init__(self, model, optimizer, patience):
        self.model = model
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
        self.best, self.best_state, self.bad, self.patience = float("inf"), None, 0, patience

    def judge(self, data):
        x, y = data
        self.model.eval()
        with torch.no_grad():
            score = F.mse_loss(self.model(x), y).item()
        self.model.train()
        self.plateau.step(score)
        if score < self.best - 1e-4:
            self.best, self.bad = score, 0
            self.best_state = copy.deepcopy(self.model.state_dict())
        else:
            self.bad += 1
        return score, float(self.bad > self.patience)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=14)
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--patience", type=int, default=3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    raw = load_diabetes()
    x = torch.tensor(raw.data, dtype=torch.float32) * 20
    y = torch.tensor((raw.target - raw.target.mean()) / raw.target.std(), dtype=torch.float32)[:, None]
    train, val = TensorDataset(x[:300], y[:300]), (x[300:], y[300:])
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)

    torch.manual_seed(31)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(),
                                                nn.Linear(16, 1)))
    opt = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)
    leader = Leader(ddp.module, opt, args.patience) if rank == 0 else None

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            F.mse_loss(ddp(bx), by).backward()
            opt.step()
        word = torch.zeros(2, dtype=torch.float64)
        if leader:
            score, stop = leader.judge(val)
            word = torch.tensor([opt.param_groups[0]["lr"], stop], dtype=torch.float64)
            print(f"epoch {epoch} validation {score:.6f} best {leader.best:.6f} lr {word[0]:.5f}", flush=True)
        dist.broadcast(word, 0)
        opt.param_groups[0]["lr"] = word[0].item()
        if word[1]:
            break

    if leader:
        ddp.module.load_state_dict(leader.best_state)
    for t in ddp.module.state_dict().values():
        dist.broadcast(t, 0)
    part = slice(rank, None, world)
    with torch.no_grad():
        total = F.mse_loss(ddp.module(val[0][part]), val[1][part], reduction="sum")
    dist.all_reduce(total)
    if rank == 0:
        print(f"kept weights: validation {total / len(val[0]):.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
