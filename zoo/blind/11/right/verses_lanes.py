"""A character model with carried state: window k of lane l is item k * LANES + l of the data set."""
import argparse
import inspect
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29831")

LANES, SPAN, WIDTH = 16, 10, 28


class Windows(Dataset):
    def __init__(self):
        text = inspect.getsource(argparse)[3000:13000]
        letters = sorted(set(text))
        code = {c: i for i, c in enumerate(letters)}
        self.letters = len(letters)
        self.ids = torch.tensor([code[c] for c in text])
        self.stretch = len(self.ids) // LANES
        self.per_lane = (self.stretch - 1) // SPAN

    def __len__(self):
        return self.per_lane * LANES

    def __getitem__(self, item):
        window, lane = divmod(item, LANES)
        start = lane * self.stretch + window * SPAN
        return self.ids[start:start + SPAN], self.ids[start + 1:start + SPAN + 1]


class Model(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.embed = nn.Embedding(letters, 12)
        self.rnn = nn.LSTM(12, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, ids, state):
        h, state = self.rnn(self.embed(ids), state)
        return self.out(h), tuple(s.detach() for s in state)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    data = Windows()
    loader = DataLoader(data, batch_size=LANES // world, sampler=DistributedSampler(data, shuffle=False))
    net = DDP(Model(data.letters))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    for epoch in range(2):
        state = None
        total = torch.zeros(())
        for x, y in loader:
            logits, state = net(x, state)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / len(loader):.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
