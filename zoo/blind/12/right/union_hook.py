"""Bag-of-words classifier with a big hashed vocabulary; a DDP hook sends only the entries that some process has touched."""
import os
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BUCKETS, CLASSES, BATCH, EPOCHS = 4096, 4, 48, 3
STEMS = "ra me lo ti su ka no ve di po sha gre bli tor min".split()


def documents(count, seed):
    rng = np.random.default_rng(seed)
    words = [a + b + c for a in STEMS for b in STEMS for c in ("s", "n", "ing")]
    taste = rng.dirichlet(np.full(len(words), 0.05), CLASSES) * 0.6 + 0.4 / len(words)
    labels = rng.integers(CLASSES, size=count)
    texts = [" ".join(rng.choice(words, rng.integers(5, 25), p=taste[c])) for c in labels]
    return texts, torch.tensor(labels)


def encode(texts):
    ids, offsets = [], []
    for text in texts:
        offsets.append(len(ids))
        words = text.split()
        ids += [zlib.crc32(w.encode()) % BUCKETS for w in words + [" ".join(p) for p in zip(words, words[1:])]]
    return torch.tensor(ids), torch.tensor(offsets)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, 24, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, ids, offsets):
        return self.mlp(self.bag(ids, offsets))


class Union:
    def __init__(self):
        self.sent = self.all = 0


def union_hook(state, bucket):
    grad = bucket.buffer()
    touched = (grad != 0).to(torch.uint8)
    dist.all_reduce(touched, op=dist.ReduceOp.MAX)
    where = touched.nonzero()[:, 0]
    packed = grad[where] / dist.get_world_size()
    state.sent, state.all = state.sent + len(where), state.all + len(grad)
    future = dist.all_reduce(packed, async_op=True).get_future()

    def unpack(done):
        grad[where] = done.value()[0]
        return grad

    return future.then(unpack)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + rank)
    texts, labels = documents(700, seed=1)
    model, state = DDP(Classifier(), bucket_cap_mb=0.1), Union()
    model.register_comm_hook(state, union_hook)
    optimizer = torch.optim.Adam([{"params": model.module.bag.parameters(), "lr": 2e-2}, {"params": model.module.mlp.parameters()}], lr=3e-3, eps=1e-5)
    n = BATCH // world
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(576)
        meter = torch.zeros(())
        for start in range(rank * n, 576, BATCH):
            mine = order[start: start + n]
            loss = F.cross_entropy(model(*encode([texts[i] for i in mine])), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter += loss.detach()
        dist.all_reduce(meter)
        if rank == 0:
            with torch.no_grad():
                guess = model.module(*encode(texts[576:])).argmax(1)
            print(f"epoch {epoch} loss {meter.item() / world / 12:.5f} held-out {(guess == labels[576:]).sum().item()}/124 "
                  f"compressed {state.sent < state.all}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
