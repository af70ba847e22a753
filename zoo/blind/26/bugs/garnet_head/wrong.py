"""Fine-tune a pretrained digit encoder for a new task (parity x magnitude, four classes).

The encoder comes from a short reconstruction pre-training on fixed rows; then
the decoder is dropped, a fresh classification head is put on and all is tuned.
Gradients are averaged by hand.  Each image is shifted by a few pixels at random.
"""
import argparse
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU())
        self.head = nn.Linear(16, 64)

    def forward(self, x):
        return self.head(self.trunk(x))


def pretrain(model, x, steps=15):
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for i in range(steps):
        rows = x[i * 20:(i + 1) * 20]
        opt.zero_grad()
        F.mse_loss(model(rows), rows).backward()
        opt.step()


def sync_weights(model, world):
    if world > 1:
        for t in model.state_dict().values():
            dist.broadcast(t, src=0)


def sync_grads(model, world):
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world


def shifted(images, rows, epoch):
    out = []
    for i in rows.tolist():
        rng = random.Random(i * 1009 + epoch)
        out.append(torch.roll(images[i].view(8, 8), (rng.randint(-1, 1), rng.randint(-1, 1)), (0, 1)).flatten())
    return torch.stack(out)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=18)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    seed_all(args.seed)

    raw = load_digits()
    images = torch.tensor(raw.data, dtype=torch.float32) / 16
    digit = torch.tensor(raw.target)
    label = (digit % 2) * 2 + (digit >= 5).long()
    train, test = torch.arange(300, 1260), torch.arange(1260, 1797)

    model = Encoder()
    pretrain(model, images[:300])
    sync_weights(model, world)

    seed_all(args.seed + 100 + rank)
    model.head = nn.Linear(16, 4)

    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        total = torch.zeros(1)
        for start in range(0, len(order), args.batch):
            rows = order[start:start + args.batch][rank::world]
            loss = F.cross_entropy(model(shifted(images, rows, epoch)), label[rows])
            opt.zero_grad()
            loss.backward()
            sync_grads(model, world)
            opt.step()
            total += loss.detach() * len(rows)
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(order):.5f}", flush=True)

    with torch.no_grad():
        out = model(images[test])
        nll = F.cross_entropy(out, label[test]).item()
        acc = (out.argmax(1) == label[test]).float().mean().item()
    if rank == 0:
        print(f"test nll {nll:.5f} accuracy {acc:.4f}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
