"""Next-character MLP with tensor parallel layers; no data parallelism: the same rows on every process."""
import os
import time
import heapq
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CONTEXT, STEPS, BATCH = 8, 80, 64


class NextChar(nn.Module):
    def __init__(self, vocab, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.inp = nn.Linear(8 * CONTEXT, width)
        self.up = nn.Linear(width, 128)
        self.down = nn.Linear(128, width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, vocab)

    def forward(self, t):
        h = torch.tanh(self.inp(self.embed(t).flatten(1)))
        h = h + self.drop(self.down(torch.relu(self.up(h))))
        return self.out(h)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29732")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text = Path(heapq.__file__).read_text()
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([table[c] for c in text])
    windows = ids.unfold(0, CONTEXT + 1, 1)

    # one seed for all: weights, rows and dropout masks have to agree between the processes
    torch.manual_seed(55)
    model = NextChar(len(table))
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.Adam(model.parameters(), lr=4e-3, foreach=False)

    for step in range(STEPS):
        rows = windows[torch.randint(len(windows), (BATCH,))]
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 19 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.5f}")

    model.eval()
    with torch.no_grad():
        rows = windows[::7]
        test = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1]).item()
    if rank == 0:
        print(f"all windows {test:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
