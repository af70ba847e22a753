"""Bar-by-bar rhythm model: GRU with truncated backpropagation through time.

The corpus is cut into 8 parallel streams; a process owns a block of streams and carries their hidden state
from one window to the next.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

STREAMS, WINDOW, SYMBOLS = 8, 16, 12


def make_corpus(length, seed):
    g = torch.Generator().manual_seed(seed)
    coins = torch.rand(length, generator=g)
    picks = torch.randint(SYMBOLS, (length,), generator=g)
    out = [0, 1, 2]
    for t in range(3, length):
        out.append(int(picks[t]) if coins[t] < 0.15 else (out[t - 1] + 2 * out[t - 3] + 1) % SYMBOLS)
    return torch.tensor(out)


def streams(corpus):
    per = (len(corpus) - 1) // STREAMS
    inputs = corpus[: per * STREAMS].view(STREAMS, per)
    targets = corpus[1 : per * STREAMS + 1].view(STREAMS, per)
    return inputs, targets


class Rhythm(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, ids, hidden=None):
        y, hidden = self.gru(self.embed(ids), hidden)
        return self.head(y), hidden


def windows(inputs, targets):
    for a in range(0, inputs.size(1), WINDOW):
        yield inputs[:, a : a + WINDOW], targets[:, a : a + WINDOW]


@torch.no_grad()
def validate(model, inputs, targets):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    hidden = None
    for x, y in windows(inputs, targets):
        logits, hidden = model(x, hidden)
        total[0] += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").double()
        total[1] += y.numel()
    if dist.is_initialized():
        dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def run():
    distributed = "RANK" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1
    block = slice(rank * STREAMS // world, (rank + 1) * STREAMS // world)

    train_x, train_y = (t[block] for t in streams(make_corpus(3600, seed=21)))
    valid_x, valid_y = (t[block] for t in streams(make_corpus(1000, seed=22)))

    torch.manual_seed(4)
    model = Rhythm()
    net = DistributedDataParallel(model) if distributed else model
    opt = torch.optim.RMSprop(model.parameters(), lr=4e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)

    for epoch in range(4):
        hidden = None
        for x, y in windows(train_x, train_y):
            logits, hidden = net(x, hidden)
            hidden = hidden.detach()
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        score = validate(model, valid_x, valid_y)
        plateau.step(score)
        if rank == 0:
            print(f"epoch {epoch} perplexity {math.exp(score):.3f} lr {opt.param_groups[0]['lr']:.2e}")

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    run()
