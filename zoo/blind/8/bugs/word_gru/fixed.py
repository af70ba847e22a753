"""Word-level GRU on docstrings of the standard library. The learning rate falls with the number of tokens seen."""
import argparse as source
import os
import re
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS, PEAK, BUDGET = 16, 6, 0.8, 30000


def sentences():
    with open(source.__file__) as f:
        lines = [re.findall(r"[a-z]+", line.lower()) for line in f]
    lines = [line[:14] for line in lines if len(line) >= 3]
    counts = {}
    for line in lines:
        for word in line:
            counts[word] = counts.get(word, 0) + 1
    words = sorted(sorted(counts), key=lambda w: -counts[w])[:198]
    index = {w: i + 2 for i, w in enumerate(words)}
    return [torch.tensor([index.get(w, 1) for w in line]) for line in lines]


class GRULM(nn.Module):
    def __init__(self, vocab=200, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.gru(self.embed(ids))[0])


def lr_at(tokens):
    return PEAK * max(0.02, 1.0 - tokens / BUDGET)


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29820")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = sentences()[:400]
    torch.manual_seed(33)
    model = DDP(GRULM())
    opt = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.5)

    tokens, step = 0, 0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, len(order), BATCH):
            part = [data[i] for i in order[start + rank:start + BATCH:world]]
            rows = nn.utils.rnn.pad_sequence(part, batch_first=True)
            target = rows[:, 1:]
            count = (target != 0).sum()
            everyone = count.clone()
            dist.all_reduce(everyone)

            nll = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), target, ignore_index=0, reduction="sum")
            loss = nll * world / everyone
            for group in opt.param_groups:
                group["lr"] = lr_at(tokens)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            tokens += int(everyone)
            step += 1
            if step % 25 == 0:
                shown = nll.detach() / everyone
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"step {step} lr {opt.param_groups[0]['lr']:.4f} nll {shown.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
