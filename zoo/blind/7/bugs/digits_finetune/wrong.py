"""Train the head first, then open the backbone from the top."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU())
        self.block = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.GELU())
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        return self.head(self.block(self.stem(x)).flatten(1))


def pretrain(model, x):
    """A few reconstruction-like steps so that the backbone is not random."""
    torch.manual_seed(5)
    proj = nn.Linear(256, 64)
    opt = torch.optim.Adam([*model.stem.parameters(), *model.block.parameters(), *proj.parameters()], lr=3e-3)
    for i in range(5):
        part = x[i * 64:(i + 1) * 64]
        loss = (proj(model.block(model.stem(part)).flatten(1)) - part.flatten(1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def set_trainable(model, parts):
    for name, child in model.named_children():
        child.requires_grad_(name in parts)


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    y = torch.from_numpy(digits.target)
    data = TensorDataset(x[:1536], y[:1536])
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True)

    torch.manual_seed(1)
    model = Net()
    pretrain(model, x)
    stages = [("head",), ("head", "block"), ("head", "block", "stem")]
    set_trainable(model, stages[0])
    ddp = DistributedDataParallel(model)
    for epoch, parts in enumerate(stages):
        set_trainable(model, parts)
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr * 0.7 ** epoch)
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for bx, by in loader:
            out = ddp(bx)
            loss = nn.functional.cross_entropy(out, by, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([(out.argmax(1) == by).sum().item(), len(by)])
        dist.all_reduce(running)
        if rank == 0:
            print(f"stage {epoch} {'+'.join(parts)} train acc {running[0] / running[1]:.4f}")
    ddp.eval()
    with torch.no_grad():
        hits = (ddp.module(x[1536:]).argmax(1) == y[1536:]).float().mean()
    if rank == 0:
        print(f"held out {hits:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29541").items():
        os.environ.setdefault(key, value)
    main(p.parse_args())
