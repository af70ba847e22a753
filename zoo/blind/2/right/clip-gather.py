"""Two-tower image/caption training on digits; the loss uses the features of all processes."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def captions(y, side):
    rows = []
    for label, bright in zip(y, side):
        text = f"{'bright' if bright else 'dark'} {WORDS[label]}"
        rows.append([ord(c) - 96 if c != " " else 27 for c in text.ljust(12)][:12])
    return torch.tensor(rows)


class TwoTower(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 12, 3, 1, 1), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(),
                                   nn.Linear(12 * 16, dim))
        self.emb = nn.Embedding(28, 24, padding_idx=0)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.text = nn.Linear(32, dim)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, img, tok):
        a = F.normalize(self.image(img), dim=-1)
        b = F.normalize(self.text(self.rnn(self.emb(tok))[1][-1]), dim=-1)
        return a, b, self.logit_scale.exp()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        g = torch.stack(grads)
        dist.all_reduce(g)
        return g[dist.get_rank()]


def clip_loss(a, b, scale):
    a, b = torch.cat(Gather.apply(a)), torch.cat(Gather.apply(b))
    logits = scale * a @ b.t()
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@torch.no_grad()
def recall_at(model, img, tok, k=5):
    rank, world = dist.get_rank(), dist.get_world_size()
    per = math.ceil(len(img) / world)
    idx = torch.arange(rank * per, (rank + 1) * per).clamp(max=len(img) - 1)
    a, b, _ = model(img[idx], tok[idx])
    out_a = [torch.empty_like(a) for _ in range(world)]
    out_b = [torch.empty_like(b) for _ in range(world)]
    dist.all_gather(out_a, a)
    dist.all_gather(out_b, b)
    a, b = torch.cat(out_a)[:len(img)], torch.cat(out_b)[:len(img)]
    top = (a @ b.t()).topk(k, dim=1).indices
    return (tok[top] == tok[:, None]).all(-1).any(1).float().mean().item()


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    side = x.mean(1) > x.mean()
    img = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    tok = captions(y, side)
    train, val = slice(0, 768), slice(768, 1001)

    torch.manual_seed(args.seed)
    model = DDP(TwoTower())
    named = [(n, p) for n, p in model.named_parameters()]
    opt = torch.optim.AdamW([
        {"params": [p for n, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ], lr=args.lr)
    ds = TensorDataset(img[train], tok[train])
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (i, t) in enumerate(loader):
            loss = clip_loss(*model(i, t))
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
        r5 = recall_at(model.module, img[val], tok[val])
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} scale {model.module.logit_scale.exp().item():.2f} R@5 {r5:.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=5)
    main(ap.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
