# Character LSTM on a synthetic birdsong alphabet; gradients are averaged by hand over gloo.
#   python sorrel_echo.py            one process
#   torchrun --nproc-per-node=2 sorrel_echo.py
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("sorrel")
ALPHABET = 18
LENGTH = 20
BATCH = 24
STEPS = 45
CLIP = 0.08


def songs(count, seed):
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(ALPHABET, 0.15), size=ALPHABET)
    out = np.zeros((count, LENGTH + 1), dtype=np.int64)
    out[:, 0] = rng.integers(0, ALPHABET, size=count)
    for t in range(LENGTH):
        u = rng.random(count)
        cdf = np.cumsum(table[out[:, t]], axis=1)
        out[:, t + 1] = np.minimum((u[:, None] > cdf).sum(1), ALPHABET - 1)
    return torch.from_numpy(out)


class SongModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(ALPHABET, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, ALPHABET)

    def forward(self, tokens):
        h, _ = self.lstm(self.emb(tokens))
        return self.head(h)


class Averager:
    """One flat all-reduce for all gradients."""

    def __init__(self, params, world):
        self.params = list(params)
        self.world = world

    def __call__(self):
        if self.world == 1:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.params])
        dist.all_reduce(flat)
        flat /= self.world
        at = 0
        for p in self.params:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()


def train(rank, world):
    torch.manual_seed(77)
    model = SongModel()
    average = Averager(model.parameters(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.5)
    corpus = songs(480, seed=4)
    held_out = songs(200, seed=4)[120:]
    loss_fn = nn.CrossEntropyLoss()
    picker = torch.Generator().manual_seed(13)
    per_rank = BATCH // world
    for step in range(STEPS):
        chosen = torch.randint(len(corpus), (BATCH,), generator=picker)
        rows = corpus[chosen[rank * per_rank:(rank + 1) * per_rank]]
        logits = model(rows[:, :-1])
        loss = loss_fn(logits.reshape(-1, ALPHABET), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        average()
        optimizer.step()
        if step % 15 == 14:
            log.info("step %d grad norm %.4f", step + 1, norm.item())
    with torch.no_grad():
        logits = model(held_out[:, :-1])
        score = loss_fn(logits.reshape(-1, ALPHABET), held_out[:, 1:].reshape(-1))
    log.info("held-out nll %.6f", score.item())
    return model


if __name__ == "__main__":
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    if world > 1:
        dist.init_process_group("gloo")
    model = train(rank, world)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()
