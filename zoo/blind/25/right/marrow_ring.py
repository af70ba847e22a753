"""Character model over docstrings of the standard library; gradients travel round a hand-written ring.

No collective is used for the gradients: chunks are passed to the right neighbour, first adding,
then copying.  Odd steps read their rows backwards, so that the last windows of a block stay warm.
"""
import json
import os
import sys
import textwrap
import time
import argparse as _argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CONTEXT, ROWS, STEPS = 24, 32, 30


def corpus():
    docs = []
    for mod in (json, textwrap, _argparse):
        for name in sorted(dir(mod)):
            doc = getattr(getattr(mod, name), "__doc__", None)
            if isinstance(doc, str):
                docs.append(doc)
    raw = "\n".join(docs).encode("ascii", "ignore")
    return torch.tensor(list(raw[:20000]), dtype=torch.long)


class Ring:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.right = (self.rank + 1) % self.world
        self.left = (self.rank - 1) % self.world

    def _swap(self, out, like):
        got = torch.empty_like(like)
        ops = [dist.P2POp(dist.isend, out.contiguous(), self.right), dist.P2POp(dist.irecv, got, self.left)]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
        return got

    def sum_(self, flat):
        n = self.world
        if n == 1:
            return flat
        chunks = list(flat.tensor_split(n))
        for s in range(n - 1):
            send, recv = (self.rank - s) % n, (self.rank - s - 1) % n
            chunks[recv] += self._swap(chunks[send], chunks[recv])
        for s in range(n - 1):
            send, recv = (self.rank + 1 - s) % n, (self.rank - s) % n
            chunks[recv].copy_(self._swap(chunks[send], chunks[recv]))
        return flat


class CharModel(nn.Module):
    def __init__(self, vocab=128, d=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.mix = nn.Conv1d(d, 48, 5)
        self.mix2 = nn.Conv1d(48, 48, 5)
        self.out = nn.Linear(48, vocab)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        h = F.gelu(self.mix(F.pad(h, (4, 0))))
        h = h + F.gelu(self.mix2(F.pad(h, (4, 0))))
        return self.out(h.transpose(1, 2))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    ring = Ring()
    text = corpus()
    torch.manual_seed(2)
    model = CharModel()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    starts = torch.Generator().manual_seed(50)

    for step in range(STEPS):
        s = torch.randint(0, len(text) - CONTEXT - 1, (ROWS,), generator=starts)
        if step % 2:
            s = s.sort(descending=True).values.view(world, -1)[rank]
        else:
            s = s[rank::world]
        win = text[s[:, None] + torch.arange(CONTEXT + 1)]
        logits = model(win[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), win[:, 1:].flatten()) / world
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach()[None]])
        ring.sum_(flat)
        at = 0
        for p in model.parameters():
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        opt.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} nats {flat[-1].item():.6f}", flush=True)

    with torch.no_grad():
        win = text[torch.arange(0, 2400, CONTEXT)[:, None] + torch.arange(CONTEXT + 1)][rank::world]
        nats = F.cross_entropy(model(win[:, :-1]).flatten(0, 1), win[:, 1:].flatten(), reduction="sum")
        tally = torch.stack([nats, torch.tensor(float(win[:, 1:].numel()))])
    ring.sum_(tally)
    if rank == 0:
        print(f"first pages: {tally[0].item() / tally[1].item():.6f} nats a character")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
