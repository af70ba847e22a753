"""Bag-of-embeddings review classifier. Every process reads and tokenises its own lines."""
import collections
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)

MAX_VOCAB = 160
MAX_LEN = 14
DIM = 24
GLOBAL_BATCH = 40
EPOCHS = 2
PAD, UNK = 0, 1


def corpus(n, seed):
    rnd = random.Random(seed)
    syll = ["ba", "ko", "ri", "tu", "me", "la", "so", "ni"]
    common = ["".join(p) for p in ((a, b) for a in syll for b in syll)]
    good = [w + "x" for w in common[:40]]
    bad = [w + "q" for w in common[24:64]]
    lines = []
    for _ in range(n):
        label = rnd.randint(0, 1)
        mood = good if label else bad
        k = rnd.randint(8, MAX_LEN)
        words = [rnd.choice(mood) if rnd.random() < 0.35 else rnd.choice(common) for _ in range(k)]
        lines.append((" ".join(words), label))
    return lines


def build_vocab(lines):
    freq = collections.Counter(w for text, _ in lines for w in text.split())
    return {w: i + 2 for i, (w, _) in enumerate(freq.most_common(MAX_VOCAB - 2))}


def encode(lines, vocab):
    ids = torch.full((len(lines), MAX_LEN), PAD)
    for row, (text, _) in enumerate(lines):
        for col, w in enumerate(text.split()[:MAX_LEN]):
            ids[row, col] = vocab.get(w, UNK)
    return ids, torch.tensor([label for _, label in lines], dtype=torch.float32)


class BagModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(MAX_VOCAB, DIM, padding_idx=PAD)
        self.hidden = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids):
        mask = (ids != PAD).unsqueeze(-1).float()
        h = (self.emb(ids) * mask).sum(1) / mask.sum(1)
        return self.out(torch.tanh(self.hidden(h))).squeeze(-1)


def batches(n, size, epoch):
    g = torch.Generator().manual_seed(100 + epoch)
    return torch.randperm(n, generator=g)[: n - n % size].split(size)


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    lines = corpus(1000, seed=0)
    train_lines, test_lines = lines[:800], lines[800:]
    mine = train_lines[rank::world]
    vocab = build_vocab(train_lines)
    ids, labels = encode(mine, vocab)
    test_ids, test_labels = encode(test_lines[rank::world], vocab)
    if rank == 0:
        print(f"{len(train_lines)} train lines, {len(mine)} per process, vocabulary {len(vocab) + 2}")

    torch.manual_seed(0)
    model = DDP(BagModel())
    opt = torch.optim.Adam(model.parameters(), lr=0.02)

    for epoch in range(EPOCHS):
        running = torch.zeros(2)
        for take in batches(len(ids), GLOBAL_BATCH // world, epoch):
            loss = F.binary_cross_entropy_with_logits(model(ids[take]), labels[take])
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item(), 1.0])
        with torch.no_grad():
            right = ((model.module(test_ids) > 0) == (test_labels > 0.5)).sum()
        count = torch.stack([right, torch.tensor(len(test_ids))])
        dist.all_reduce(count)
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}  loss {(running[0] / running[1]).item():.4f}  "
                  f"test acc {(count[0] / count[1]).item():.3f}", flush=True)

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "vocab": vocab}, "reviews.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
