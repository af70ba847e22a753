"""Tag embeddings for a photo site: guess the sixth tag of a photo from the other five.

Two sparse tables (one for context tags, one for the guessed tag) and a small dense
mixer. Every process reads its own slice of the photos of a step; the gradients of the
processes are averaged before the optimizers move.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TAGS = 240
THEMES = 12
CONTEXT = 5
NEGATIVES = 6
DIM = 16
BATCH = 48
STEPS = 40


class TagGuesser(nn.Module):
    def __init__(self):
        super().__init__()
        self.context = nn.Embedding(TAGS, DIM, sparse=True)
        self.target = nn.Embedding(TAGS, DIM, sparse=True)
        self.mixer = nn.Sequential(nn.Linear(DIM, 24), nn.Tanh(), nn.Linear(24, DIM))
        nn.init.normal_(self.context.weight, std=0.3)
        nn.init.normal_(self.target.weight, std=0.3)

    def forward(self, tags, candidates):
        query = self.mixer(self.context(tags).mean(dim=1))
        return torch.einsum("bd,bkd->bk", query, self.target(candidates))


class Photos:
    """Photos of THEMES themes; a theme prefers its own tags."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        count = BATCH * STEPS
        theme = rng.integers(THEMES, size=count)
        per_theme = TAGS // THEMES
        own = theme[:, None] * per_theme + rng.integers(per_theme, size=(count, CONTEXT + 1))
        stray = rng.integers(TAGS, size=own.shape)
        tags = np.where(rng.random(own.shape) < 0.15, stray, own)
        self.tags = torch.from_numpy(tags)
        self.wrong = torch.from_numpy(rng.integers(TAGS, size=(count, NEGATIVES)))

    def slice(self, step, rank, world):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH)[rank::world]
        tags = self.tags[rows]
        candidates = torch.cat([tags[:, CONTEXT:], self.wrong[rows]], dim=1)
        return tags[:, :CONTEXT], candidates


def average_sparse(grad, world):
    index, values = grad._indices(), grad._values().clone()
    dist.all_reduce(values)
    return torch.sparse_coo_tensor(index, values / world, grad.shape)


def average_dense(grad, world):
    dist.all_reduce(grad)
    return grad / world


def average_gradients(model, world):
    for p in model.parameters():
        if p.grad.is_sparse:
            p.grad = average_sparse(p.grad, world)
        else:
            p.grad = average_dense(p.grad, world)


def hit_rate(model, photos):
    with torch.no_grad():
        hits = 0
        for step in range(4):
            tags, candidates = photos.slice(step, 0, 1)
            hits += (model(tags, candidates).argmax(dim=1) == 0).sum().item()
    return hits / (4 * BATCH)


def run(rank, world):
    torch.manual_seed(31)
    model = TagGuesser()
    photos = Photos(seed=8)
    tables = torch.optim.Adagrad(
        [model.context.weight, model.target.weight], lr=0.1, initial_accumulator_value=1e-5)
    dense = torch.optim.AdamW(model.mixer.parameters(), lr=5e-3)

    for step in range(STEPS):
        tags, candidates = photos.slice(step, rank, world)
        scores = model(tags, candidates)
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        loss.backward()
        average_gradients(model, world)
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 8 == 7:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:3d}  loss {shown.item() / world:.4f}", flush=True)

    if rank == 0:
        print(f"first guess right on seen photos: {hit_rate(model, photos):.3f}")
        norm = model.context.weight.norm().item()
        print(f"norm of the context table {norm:.4f}", flush=True)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    guesser = run(dist.get_rank(), dist.get_world_size())
    time.sleep(0.3)
    dist.destroy_process_group()
