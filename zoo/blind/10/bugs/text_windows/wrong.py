# Next-letter model, whole batch at every step; every process works on its stretch of the text.
import inspect
import os
import shlex
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CONTEXT, STEPS, LETTERS = 10, 60, 2400

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29714")


def encode():
    text = inspect.getsource(shlex)[:LETTERS]
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(c) for c in text]), len(alphabet)


def own_windows(ids, rank, world):
    stretch = ids.chunk(world)[rank]
    return stretch.unfold(0, CONTEXT + 1, 1)


class Net(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.table = nn.Embedding(letters, 12)
        self.place = nn.Parameter(torch.zeros(CONTEXT, 12))
        self.hidden = nn.Linear(12 * CONTEXT, 48)
        self.out = nn.Linear(48, letters)

    def forward(self, x):
        h = self.table(x) + self.place
        return self.out(torch.tanh(self.hidden(h.flatten(1))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, letters = encode()
    mine = own_windows(ids, rank, world)
    count = torch.tensor(float(len(mine)))
    dist.all_reduce(count)

    torch.manual_seed(30)
    net = Net(letters)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.4, momentum=0.9)
    inputs, target = mine[:, :-1], mine[:, -1]
    for step in range(1, STEPS + 1):
        loss = F.cross_entropy(net(inputs), target, reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        for p in params:
            dist.all_reduce(p.grad)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 12 == 0:
            print(f"step {step} loss {shown.item():.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
