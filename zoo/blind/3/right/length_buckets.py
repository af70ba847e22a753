"""Sequence classification with length buckets. A global batch is cut so that ranks get similar numbers of tokens,
hence different numbers of sequences."""
import argparse
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB = 60


def make_corpus(n, seed):
    rnd = random.Random(seed)
    out = []
    for _ in range(n):
        label = rnd.randrange(4)
        length = int(4 + rnd.paretovariate(1.2)) % 40 + 4
        toks = [rnd.randrange(1, VOCAB) if rnd.random() < 0.6 else 1 + label * 10 + rnd.randrange(10) for _ in range(length)]
        out.append((toks, label))
    return out


class BucketBatches:
    def __init__(self, lengths, batch, seed):
        self.lengths, self.batch, self.seed = lengths, batch, seed

    def epoch(self, e):
        rnd = random.Random(f"{self.seed}-{e}")
        idx = list(range(len(self.lengths)))
        rnd.shuffle(idx)
        pool = 6 * self.batch
        batches = []
        for i in range(0, len(idx), pool):
            part = sorted(idx[i:i + pool], key=lambda j: self.lengths[j])
            batches += [part[k:k + self.batch] for k in range(0, len(part), self.batch)]
        rnd.shuffle(batches)
        return batches


def cut_by_tokens(batch, lengths, world):
    """Greedy: longest first to the rank with the fewest tokens. Deterministic, every rank computes the same cut."""
    loads, parts = [0] * world, [[] for _ in range(world)]
    for j in sorted(batch, key=lambda j: (-lengths[j], j)):
        r = loads.index(min(loads))
        parts[r].append(j)
        loads[r] += lengths[j]
    return parts


class Tagger(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.att = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        pad = x == 0
        h = self.emb(x)
        a, _ = self.att(h, h, h, key_padding_mask=pad, need_weights=False)
        h = self.ln(h + a).masked_fill(pad[..., None], 0.0)
        return self.mlp(h.sum(1) / (~pad).sum(1, keepdim=True))


def to_tensors(corpus, idx):
    width = max(len(corpus[j][0]) for j in idx)
    x = torch.zeros(len(idx), width, dtype=torch.long)
    for row, j in enumerate(idx):
        x[row, : len(corpus[j][0])] = torch.tensor(corpus[j][0])
    return x, torch.tensor([corpus[j][1] for j in idx])


def evaluate(net, corpus, rank, world):
    net.eval()
    conf = torch.zeros(4, 4, dtype=torch.long)
    order = sorted(range(len(corpus)), key=lambda j: len(corpus[j][0]))[rank::world]
    with torch.no_grad():
        for i in range(0, len(order), 32):
            x, y = to_tensors(corpus, order[i:i + 32])
            for t, p in zip(y.tolist(), net(x).argmax(1).tolist()):
                conf[t, p] += 1
    dist.all_reduce(conf)
    net.train()
    tp = conf.diag().float()
    f1 = 2 * tp / (conf.sum(0) + conf.sum(1)).clamp(min=1)
    return tp.sum().item() / conf.sum().item(), f1.mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = make_corpus(700, 1), make_corpus(151, 2)
    lengths = [len(t) for t, _ in train]
    buckets = BucketBatches(lengths, args.batch, seed=6)
    torch.manual_seed(6)
    model = DDP(Tagger())
    opt = torch.optim.RMSprop(model.parameters(), lr=args.lr, alpha=0.95, eps=1e-5)
    for e in range(args.epochs):
        seen = torch.zeros(2)
        for batch in buckets.epoch(e):
            mine = cut_by_tokens(batch, lengths, world)[rank]
            x, y = to_tensors(train, mine)
            per_sample = F.cross_entropy(model(x), y, reduction="none")
            loss = per_sample.sum() * world / len(batch)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            seen += torch.tensor([per_sample.sum().item(), len(mine)])
        dist.all_reduce(seen)
        acc, f1 = evaluate(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {e}: train loss {seen[0] / seen[1]:.5f} over {int(seen[1])} sequences; test acc {acc:.4f} macro-f1 {f1:.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
