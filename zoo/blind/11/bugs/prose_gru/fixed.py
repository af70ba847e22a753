import argparse
import inspect
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29806")


def windows(length):
    text = inspect.getsource(json) + inspect.getsource(json.decoder)
    alphabet = sorted(set(text))
    index = {c: i for i, c in enumerate(alphabet)}
    ids = torch.tensor([index[c] for c in text])
    n = (len(ids) - 1) // length
    return ids[:n * length].view(n, length), ids[1:n * length + 1].view(n, length), len(alphabet)


class CharModel(nn.Module):
    def __init__(self, letters, width):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, letters)

    def forward(self, ids):
        return self.out(self.gru(self.embed(ids))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--clip", type=float, default=0.4)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, letters = windows(20)
    torch.manual_seed(17)
    model = CharModel(letters, 28)
    net = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(net.parameters(), lr=0.8, momentum=0.8)
    gen = torch.Generator().manual_seed(30)
    for step in range(args.steps):
        rows = torch.randint(len(x), (args.batch,), generator=gen)[rank::world]
        loss = F.cross_entropy(net(x[rows]).flatten(0, 1), y[rows].flatten())
        opt.zero_grad()
        loss.backward()
        shown = loss.detach() / world
        dist.reduce(shown, 0)
        norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip)
        if rank == 0:
            if step % 20 == 0:
                print(f"{step:4d}  loss {shown.item():.4f}  gradient norm {norm.item():.4f}")
        opt.step()
    with torch.no_grad():
        total = F.cross_entropy(model(x[rank::world]).flatten(0, 1), y[rank::world].flatten(), reduction="sum")
    dist.all_reduce(total)
    if rank == 0:
        print(f"whole text: {total.item() / x.numel():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
