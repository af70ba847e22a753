"""Digits MLP: EMA weights, validation by the first process, ReduceLROnPlateau and early stopping."""
import argparse
import copy
import io
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64, help="per process")
    p.add_argument("--max-epochs", type=int, default=5)
    p.add_argument("--patience", type=int, default=2)
    p.add_argument("--decay", type=float, default=0.9)
    p.add_argument("--lr", type=float, default=0.25)
    return p.parse_args()


class Averaged:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = load_digits(return_X_y=True)
        xt, xv, yt, yv = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
        self.train = TensorDataset(torch.tensor(xt, dtype=torch.float32), torch.tensor(yt))
        self.val = torch.tensor(xv, dtype=torch.float32), torch.tensor(yv)
        self.sampler = DistributedSampler(self.train, shuffle=True, drop_last=True)
        self.loader = DataLoader(self.train, args.batch_size, sampler=self.sampler, drop_last=True)
        torch.manual_seed(11)
        self.net = DDP(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.8, nesterov=True)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.3, patience=0, threshold=0.3)
        self.ema = Averaged(self.net.module, args.decay) if self.rank == 0 else None
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def validate(self):
        verdict = torch.zeros(2)
        if self.rank == 0:
            with torch.no_grad():
                out = self.ema.net(self.val[0])
            verdict[0] = nn.functional.cross_entropy(out, self.val[1])
            verdict[1] = (out.argmax(1) == self.val[1]).float().mean()
        dist.broadcast(verdict, src=0)
        return verdict.tolist()

    def fit(self):
        best, stale, kept = float("inf"), 0, None
        for epoch in range(self.args.max_epochs):
            self.sampler.set_epoch(epoch)
            for xb, yb in self.loader:
                self.opt.zero_grad()
                self.criterion(self.net(xb), yb).backward()
                self.opt.step()
                if self.ema:
                    self.ema.update(self.net.module)
            loss, acc = self.validate()
            self.plateau.step(loss)
            if self.rank == 0:
                print(f"epoch {epoch} val loss {loss:.5f} acc {acc:.4f} lr {self.opt.param_groups[0]['lr']:.5f}")
            if loss < best - 1e-3:
                best, stale = loss, 0
                if self.rank == 0:
                    kept = io.BytesIO()
                    torch.save(self.ema.net.state_dict(), kept)
            else:
                stale += 1
            if stale > self.args.patience:
                break
        if self.rank == 0:
            kept.seek(0)
            self.ema.net.load_state_dict(torch.load(kept))
        final = self.validate()
        if self.rank == 0:
            print(f"kept model: val loss {final[0]:.5f} acc {final[1]:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(parse()).fit()
    time.sleep(0.3)
    dist.destroy_process_group()
