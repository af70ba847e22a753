"""Byte-level trigram network on the documentation of the standard library; reports validation perplexity."""
import inspect
import logging
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = ["textwrap", "string", "json", "random", "heapq", "bisect", "statistics", "fractions",
           "calendar", "difflib", "shlex", "argparse", "csv", "queue"]
CONTEXT, BATCH, STEPS = 4, 128, 50
logger = logging.getLogger("topaz")


def gather_documents():
    docs = []
    for name in MODULES:
        module = __import__(name)
        for attr in sorted(vars(module)):
            text = inspect.getdoc(getattr(module, attr, None))
            if text and getattr(getattr(module, attr), "__module__", None) == name:
                raw = text.encode("ascii", "replace")[:600]
                if len(raw) > 2 * CONTEXT:
                    docs.append(torch.tensor([min(b, 127) for b in raw]))
    return docs


class Trigram(nn.Module):
    def __init__(self, width=20, hidden=64):
        super().__init__()
        self.emb = nn.Embedding(128, width)
        self.mlp = nn.Sequential(nn.Linear(CONTEXT * width, hidden), nn.Tanh(), nn.Linear(hidden, 128))

    def forward(self, ctx):
        return self.mlp(self.emb(ctx).flatten(1))


def windows(doc):
    w = doc.unfold(0, CONTEXT + 1, 1)
    return w[:, :CONTEXT], w[:, CONTEXT]


@torch.no_grad()
def validate(model, docs, rank, world):
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for doc in docs[rank * len(docs) // world:(rank + 1) * len(docs) // world]:
        ctx, nxt = windows(doc)
        totals[0] += F.cross_entropy(model(ctx), nxt, reduction="sum").double()
        totals[1] += len(nxt)
    model.train()
    perplexity = torch.exp(totals[0] / totals[1])
    dist.all_reduce(perplexity)
    return perplexity.item() / world


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(format="%(message)s", level=logging.INFO if rank == 0 else logging.ERROR)

    docs = gather_documents()
    held, kept = docs[::5], [d for i, d in enumerate(docs) if i % 5]
    held = sorted(held, key=len)[-31:]
    ctx, nxt = (torch.cat(part) for part in zip(*map(windows, kept)))
    torch.manual_seed(404)
    model = DDP(Trigram())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    draw = torch.Generator().manual_seed(12)
    share = BATCH // world

    for step in range(1, STEPS + 1):
        idx = torch.randint(len(nxt), (BATCH,), generator=draw)[rank * share:(rank + 1) * share]
        loss = F.cross_entropy(model(ctx[idx]), nxt[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            value = validate(model.module, held, rank, world)
            logger.info("step %d perplexity %.4f bits %.5f", step, value, math.log2(value))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
