"""Word model with a tied embedding; gradients leave for the other processes while backward is running."""
import argparse
import collections
import os
import re
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Overlap:
    """Starts an all-reduce for every parameter once its gradient is complete."""

    def __init__(self, module):
        self.active, self.pending = False, []
        self.world = dist.get_world_size()
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        if self.active:
            p.grad.div_(self.world)
            self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


class WordModel(nn.Module):
    def __init__(self, vocab, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.norm(self.mix(self.embed(ids))[0]))


def corpus(vocab):
    words = []
    for name in ("this", "antigravity", "doctest", "difflib", "optparse"):
        with open(os.path.join(os.path.dirname(os.__file__), name + ".py"), encoding="utf-8") as f:
            words += re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", f.read())
    common = [w for w, _ in sorted(collections.Counter(words).items(), key=lambda t: (-t[1], t[0]))[:vocab - 1]]
    index = {w: i + 1 for i, w in enumerate(common)}
    return torch.tensor([index.get(w, 0) for w in words])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=300)
    ap.add_argument("--length", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=0.3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text = corpus(args.vocab)
    torch.manual_seed(0)
    model = WordModel(args.vocab)
    nn.init.normal_(model.embed.weight, std=0.05)
    overlap = Overlap(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    gen = torch.Generator().manual_seed(3)
    for step in range(args.steps):
        report = torch.zeros(1)
        for micro in range(args.accumulate):
            start = torch.randint(0, len(text) - args.length - 1, (args.batch,), generator=gen)
            start = start[rank * args.batch // world:(rank + 1) * args.batch // world]
            ids = text[start[:, None] + torch.arange(args.length + 1)]
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / args.accumulate
            overlap.active = micro + 1 == args.accumulate
            loss.backward()
            report += loss.detach()
        overlap.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        if step % 10 == 9:
            dist.all_reduce(report)
            if rank == 0:
                print(f"step {step + 1} loss {report.item() / world:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
