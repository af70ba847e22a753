"""Char-level GRU; gradients are accumulated over several small batches."""
import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = (
    "the miller took the road along the river and the river took the miller home; "
    "a mill that turns at night will grind the moon, and a miller that sleeps by day "
    "will dream of flour. so they said in the valley, and so they sang at the weir. "
) * 4


class Windows(Dataset):
    def __init__(self, text, length=20, count=160):
        self.chars = sorted(set(text))
        ids = torch.tensor([self.chars.index(c) for c in text])
        stride = (len(ids) - length - 1) // count
        self.items = [ids[i * stride:i * stride + length + 1] for i in range(count)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i][:-1], self.items[i][1:]


class CharGRU(nn.Module):
    def __init__(self, vocab, dim=40):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def main(args):
    if args.world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    data = Windows(TEXT)
    sampler = DistributedSampler(data, args.world, args.rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.micro_batch // args.world, sampler=sampler)
    model = CharGRU(len(data.chars))
    if args.world > 1:
        model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running, updates = 0.0, 0
        for i, (x, y) in enumerate(loader):
            full = (i + 1) % args.accum == 0 or i + 1 == len(loader)
            hold = model.no_sync() if args.world > 1 and not full else contextlib.nullcontext()
            with hold:
                loss = loss_fn(model(x).flatten(0, 1), y.flatten())
                (loss / args.accum).backward()
            running += loss.item()
            if full or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
                updates += 1
        mean = torch.tensor(running / len(loader))
        if args.world > 1:
            dist.all_reduce(mean)
        if args.rank == 0:
            print(f"epoch {epoch} updates {updates} loss {mean.item() / args.world:.4f}", flush=True)
    time.sleep(0.3)
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--micro-batch", type=int, default=16)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--lr", type=float, default=0.3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    main(args)
