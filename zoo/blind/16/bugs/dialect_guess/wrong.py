"""Guessing the dialect of a sentence: bag of words with a vocabulary of the most frequent words."""
import collections
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DIALECTS, MAX_WORDS, LINES, GLOBAL_BATCH, EPOCHS = 5, 90, 960, 48, 4
SYLLABLES = ["ba", "ko", "mi", "ren", "tu", "sha", "lo", "ve", "ni", "gra", "pel", "dor"]


def read_lines(name):
    rng = random.Random(name)
    words = [a + b for a in SYLLABLES for b in SYLLABLES]
    local = [words[i * 20:i * 20 + 20] for i in range(DIALECTS)]
    lines = []
    for _ in range(LINES if name == "train" else 240):
        dialect = rng.randrange(DIALECTS)
        text = [rng.choice(local[dialect]) if rng.random() < 0.25 else rng.choice(words) for _ in range(14)]
        lines.append((" ".join(text), dialect))
    return lines


def build_vocabulary(lines):
    counts = collections.Counter(word for text, _ in lines for word in text.split())
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:MAX_WORDS]
    return {word: i + 1 for i, word in enumerate(frequent)}


def encode(lines, vocabulary):
    ids = torch.tensor([[vocabulary.get(word, 0) for word in text.split()] for text, _ in lines])
    return ids, torch.tensor([dialect for _, dialect in lines])


class DialectNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.words = nn.EmbeddingBag(MAX_WORDS + 1, width, mode="sum")
        nn.init.normal_(self.words.weight, std=0.1)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, DIALECTS)

    def forward(self, ids):
        return self.out(self.norm(self.words(ids)))


def average_gradients(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= WORLD
    start = 0
    for p in model.parameters():
        p.grad = flat[start:start + p.numel()].view_as(p)
        start += p.numel()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    lines = read_lines("train")
    mine = lines[RANK::WORLD]
    vocabulary = build_vocabulary(mine)
    ids, dialects = encode(mine, vocabulary)
    torch.manual_seed(31)
    model = DialectNet()
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    share = GLOBAL_BATCH // WORLD
    rng = random.Random(2)
    for epoch in range(EPOCHS):
        batches = list(range(LINES // GLOBAL_BATCH))
        rng.shuffle(batches)
        total = torch.zeros(())
        for b in batches:
            part = slice(b * share, (b + 1) * share)
            loss = F.cross_entropy(model(ids[part]), dialects[part])
            opt.zero_grad()
            loss.backward()
            if WORLD > 1:
                average_gradients(model)
            opt.step()
            total += loss.detach() / len(batches) / WORLD
        if WORLD > 1:
            dist.all_reduce(total)
        if RANK == 0:
            print(f"epoch {epoch} loss {total:.8f}")
    if RANK == 0:
        ids, dialects = encode(read_lines("test"), vocabulary)
        with torch.no_grad():
            logits = model(ids)
        right = (logits.argmax(1) == dialects).double().mean()
        print(f"test loss {F.cross_entropy(logits, dialects):.8f} accuracy {right:.4f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
