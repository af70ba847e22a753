"""Toy detector: digits pasted on a canvas, one box regression and one objectness score per grid cell."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

SIDE, CELL = 24, 4


class Scenes(Dataset):
    """Scene i holds i % 4 digits, and every fifth run of 64 scenes is background only on its even places."""

    def __init__(self, n):
        self.digits = load_digits().images / 16
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        image = rng.normal(0, 0.05, (SIDE, SIDE)).astype(np.float32)
        boxes = []
        empty = (i // 64) % 5 == 2 and i % 2 == 0
        for _ in range(0 if empty else i % 4):
            top, left = rng.integers(0, SIDE - 8, 2)
            image[top:top + 8, left:left + 8] += self.digits[rng.integers(len(self.digits))]
            boxes.append([(top + 4) / SIDE, (left + 4) / SIDE, 8 / SIDE, 8 / SIDE])
        return torch.from_numpy(image)[None], torch.tensor(boxes, dtype=torch.float32).view(-1, 4)


def collate(items):
    return torch.stack([a for a, _ in items]), [b for _, b in items]


class Detector(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.GroupNorm(4, c), nn.ReLU(),
                                  nn.Conv2d(c, 2 * c, 3, 2, 1), nn.GroupNorm(4, 2 * c), nn.ReLU(),
                                  nn.Conv2d(2 * c, 2 * c, 3, 1, 1), nn.ReLU())
        self.score = nn.Conv2d(2 * c, 1, 1)
        self.box = nn.Sequential(nn.Linear(2 * c, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, images, targets):
        feats = self.body(images)
        score = self.score(feats).squeeze(1)
        hot = torch.zeros_like(score)
        rows, wanted = [], []
        for b, boxes in enumerate(targets):
            for box in boxes:
                r, c = int(box[0] * SIDE // CELL), int(box[1] * SIDE // CELL)
                hot[b, r, c] = 1
                rows.append(feats[b, :, r, c])
                wanted.append(box)
        objectness = F.binary_cross_entropy_with_logits(score, hot, pos_weight=torch.tensor(4.0))
        if rows:
            boxes = F.l1_loss(self.box(torch.stack(rows)).sigmoid(), torch.stack(wanted), reduction="sum")
        else:
            boxes = self.box(feats.mean((2, 3))).sum() * 0
        return objectness, boxes


def main(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = DDP(Detector())
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    plan = torch.optim.lr_scheduler.MultiStepLR(opt, [15, 25])
    starts = range(0, args.scenes, args.batch)
    mine = [list(range(s + rank, min(s + args.batch, args.scenes), world)) for s in starts]
    loader = DataLoader(Scenes(args.scenes), batch_sampler=mine, collate_fn=collate)
    for epoch in range(args.epochs):
        log = torch.zeros(2)
        for images, targets in loader:
            boxes = torch.tensor(float(sum(map(len, targets))))
            dist.all_reduce(boxes)
            boxes = (boxes / world).clamp(min=1)
            objectness, regression = net(images, targets)
            opt.zero_grad()
            (objectness + 5 * regression / boxes).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            plan.step()
            log += torch.stack([objectness, regression / boxes]).detach()
        dist.all_reduce(log)
        if rank == 0:
            print("epoch %d objectness %.4f boxes %.4f" % (epoch, *(log / world / len(mine)).tolist()))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--scenes", type=int, default=640)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=3e-3)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(ap.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
