import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, lo, hi):
        d = load_digits()
        self.images = torch.tensor(d.images[lo:hi], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(d.target[lo:hi])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        )
        self.classifier = nn.Linear(32 * 16, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        train = Digits(0, 896)
        self.sampler = DistributedSampler(train, seed=args.seed)
        self.loader = DataLoader(train, batch_size=args.batch_size // self.world, sampler=self.sampler)
        self.model = DistributedDataParallel(ConvNet())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        accum, n = self.args.accum, len(self.loader)
        steps = 0
        for i, (x, y) in enumerate(self.loader):
            window = min(accum, n - i // accum * accum)
            boundary = (i + 1) % accum == 0 or i + 1 == n
            with nullcontext() if boundary else self.model.no_sync():
                loss = self.loss(self.model(x), y) / window
                loss.backward()
            if boundary or i + 1 == n:
                self.opt.step()
                self.opt.zero_grad()
                steps += 1
        return loss.item() * window, steps

    def fit(self):
        for epoch in range(self.args.epochs):
            loss, steps = self.run_epoch(epoch)
            if self.rank == 0:
                print(f"epoch {epoch} | {steps} updates | loss {loss:.4f}")
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), "convnet.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=64, help="samples of one micro-batch over all ranks")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(a.seed)
    trainer = Trainer(a)
    trainer.fit()
    dist.destroy_process_group()
