"""Next-syllable model; the learning rate follows the number of syllables consumed."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SYLLABLES, LONGEST, LINES = 24, 18, 384
BATCH = 32
WARM, END = 1500, 7500
PEAK = 8e-3


class Chant(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.embed = nn.Embedding(SYLLABLES, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.gain = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, SYLLABLES)

    def forward(self, ids):
        h, _ = self.gru(self.embed(ids))
        return self.out(h * self.gain)


def corpus():
    g = torch.Generator().manual_seed(44)
    jump = torch.randint(1, SYLLABLES, (SYLLABLES, 2), generator=g)
    ids = torch.zeros(LINES, LONGEST + 1, dtype=torch.long)
    ids[:, 0] = torch.randint(0, SYLLABLES, (LINES,), generator=g)
    for t in range(LONGEST):
        side = (torch.rand(LINES, generator=g) < 0.25).long()
        ids[:, t + 1] = (ids[:, t] + jump[ids[:, t], side]) % SYLLABLES
    lengths = torch.randint(4, LONGEST + 1, (LINES,), generator=g)
    return ids, lengths


def rate(consumed):
    if consumed < WARM:
        return PEAK * (consumed + 1) / WARM
    return PEAK * max(0.05, (END - consumed) / (END - WARM))


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(9)
    net = Chant()
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=rate(0))
    ids, lengths = corpus()
    consumed = 0

    for epoch in range(2):
        order = torch.randperm(LINES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, LINES, BATCH):
            rows = order[start:start + BATCH][rank::world]
            line, size = ids[rows], lengths[rows]
            valid = torch.arange(LONGEST) < size[:, None]
            count = valid.sum()
            if world > 1:
                dist.all_reduce(count)
            nats = F.cross_entropy(model(line[:, :-1])[valid], line[:, 1:][valid], reduction="sum")
            loss = nats * world / count

            for group in optimizer.param_groups:
                group["lr"] = rate(consumed)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            consumed += int(valid.sum())

            if start % 128 == 96:
                shown = loss.detach() / world
                if world > 1:
                    dist.all_reduce(shown)
                if rank == 0:
                    print(f"epoch {epoch} line {start + BATCH:3d} loss {shown.item():.8f}")

    if rank == 0:
        print(f"output norm {net.out.weight.norm().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
