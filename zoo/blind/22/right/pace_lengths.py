"""Sort-a-sequence task with a length curriculum, token-budget batches and a restart inside an epoch.

A batch holds as many sequences as fit in the token budget.  They are dealt to the processes so that these have
about the same number of tokens, hence not the same number of sequences.
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

DIGITS, BUDGET, EPOCHS = 6, 160, 3
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def corpus(count, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (count,), generator=g).tolist()
    return [torch.randint(1, DIGITS + 1, (n,), generator=g) for n in lengths]


class PacedBatches:
    """Shorter sequences first in early epochs; knows its position, so that it can be saved."""

    def __init__(self, data, seed):
        self.data, self.seed, self.epoch, self.cursor = data, seed, 0, 0

    def plan(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        noise = torch.rand(len(self.data), generator=g) * (4 + 12 * self.epoch)
        keys = torch.tensor([float(len(s)) for s in self.data]) + noise
        batches, current, tokens = [], [], 0
        for i in keys.argsort().tolist():
            if tokens + len(self.data[i]) > BUDGET:
                batches, current, tokens = batches + [current], [], 0
            current.append(i)
            tokens += len(self.data[i])
        batches.append(current)
        order = torch.randperm(len(batches), generator=g).tolist() if self.epoch else range(len(batches))
        return [batches[i] for i in order]

    def __iter__(self):
        batches = self.plan()
        while self.cursor < len(batches):
            self.cursor += 1
            yield batches[self.cursor - 1]
        self.epoch, self.cursor = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state):
        self.epoch, self.cursor = state["epoch"], state["cursor"]


def deal(batch, data):
    """Longest first to the process with the fewest tokens so far."""
    load, hands = [0] * WORLD, [[] for _ in range(WORLD)]
    for i in sorted(batch, key=lambda i: -len(data[i])):
        w = load.index(min(load))
        hands[w].append(i)
        load[w] += len(data[i])
    return hands[RANK]


class Sorter(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(DIGITS + 1, width, padding_idx=0)
        self.mix = nn.Linear(2 * width, width)
        self.step = nn.Linear(width + 1, 48)
        self.out = nn.Linear(48, DIGITS)

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        e = self.embed(ids)
        bag = (e * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        h = torch.tanh(self.mix(torch.cat([e, bag.expand_as(e)], -1))) * mask
        place = (torch.arange(ids.size(1)) / mask.sum(1)).unsqueeze(-1)
        pooled = h.sum(1, keepdim=True).expand(-1, ids.size(1), -1) / mask.sum(1, keepdim=True)
        return self.out(F.relu(self.step(torch.cat([pooled, place.to(h.dtype)], -1))))


def score(model, data, rows):
    ids = pad_sequence([data[i] for i in rows], batch_first=True)
    goal = pad_sequence([data[i].sort().values - 1 for i in rows], batch_first=True, padding_value=-100)
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), goal.flatten(), ignore_index=-100, reduction="sum")
    return loss, ((logits.argmax(-1) == goal) & (goal >= 0)).sum()


def reduce(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


class Run:
    def __init__(self, data):
        torch.manual_seed(44)
        self.model = Sorter().double()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.batches, self.data = PacedBatches(data, seed=45), data

    def epoch(self, stop_after=None):
        for batch in self.batches:
            tokens = sum(len(self.data[i]) for i in batch)
            self.opt.zero_grad()
            if hand := deal(batch, self.data):
                (score(self.model, self.data, hand)[0] / tokens).backward()
            for p in self.model.parameters():
                p.grad = reduce(torch.zeros_like(p) if p.grad is None else p.grad)
            self.opt.step()
            if self.batches.cursor == stop_after:
                return

    def parts(self):
        return {"model": self.model, "opt": self.opt, "batches": self.batches}


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    train, test = corpus(700, 1), corpus(150, 2)
    run = Run(train)
    run.epoch()
    run.epoch(stop_after=11)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"process{RANK}.pt")  # replicas are equal, everybody keeps a copy
        torch.save({k: v.state_dict() for k, v in run.parts().items()}, path)
        run, saved = Run(train), torch.load(path)
        for k, v in run.parts().items():
            v.load_state_dict(saved[k])
    while run.batches.epoch < EPOCHS:
        run.epoch()
        with torch.no_grad():
            loss, right = score(run.model, test, range(RANK, len(test), WORLD))
        totals = reduce(torch.stack([loss, right.double()])) / sum(map(len, test))
        if RANK == 0:
            print(f"epoch {run.batches.epoch} test loss {totals[0]:.6f} token accuracy {totals[1]:.4f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
