"""Intent of search queries from their words (bag of embeddings, frequent words only)."""
import argparse
import random
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

INTENTS = ["buy", "find", "repair", "compare"]


def corpus(count, seed):
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(rng.sample(syllables, 2)) for _ in range(220)]
    special = {i: rng.sample(words, 25) for i in range(len(INTENTS))}
    queries = []
    for _ in range(count):
        label = rng.randrange(len(INTENTS))
        text = [rng.choice(special[label]) if rng.random() < 0.45 else words[int(220 * rng.random() ** 2.5)]
                for _ in range(rng.randint(3, 9))]
        queries.append((text, label))
    return queries


def vocabulary(queries, size):
    counts = Counter(word for text, _ in queries for word in text)
    kept = sorted(counts, key=lambda w: (-counts[w], w))[:size - 1]
    return {word: i + 1 for i, word in enumerate(kept)}


def collate(queries, number):
    ids = [[number.get(w, 0) for w in text] for text, _ in queries]
    starts = torch.tensor([0] + [len(t) for t in ids[:-1]]).cumsum(0)
    return torch.tensor(sum(ids, [])), starts, torch.tensor([label for _, label in queries])


class Intent(nn.Module):
    def __init__(self, size, width=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(size, width, mode="mean")
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, len(INTENTS)))

    def forward(self, ids, starts):
        return self.out(self.bag(ids, starts))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--vocab", type=int, default=128)
    p.add_argument("--lr", type=float, default=0.5)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    queries = corpus(640, seed=19)
    mine = queries[rank::world]
    number = vocabulary(queries, args.vocab)
    model = DDP(Intent(args.vocab))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    local = args.batch // world

    for epoch in range(args.epochs):
        sums = torch.zeros(2)
        for start in range(0, len(mine), local):
            ids, starts, label = collate(mine[start:start + local], number)
            logits = model(ids, starts)
            loss = F.cross_entropy(logits, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sums += torch.tensor([loss.item() * len(label), (logits.argmax(1) == label).sum().item()])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / len(queries):.4f} accuracy {sums[1] / len(queries):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
