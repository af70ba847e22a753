import inspect
import os
import textwrap
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29803")

LANES, SPAN, WIDTH = 16, 12, 32


class Reader(nn.Module):
    """Reads its lanes piece by piece and remembers where its thoughts were."""

    def __init__(self, letters, lanes):
        super().__init__()
        self.embed = nn.Embedding(letters, 12)
        self.rnn = nn.GRU(12, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, letters)
        self.register_buffer("state", torch.zeros(1, lanes, WIDTH))

    def forward(self, ids):
        h, last = self.rnn(self.embed(ids), self.state.clone())
        self.state.copy_(last.detach())
        return self.out(h)


def lanes_of_text():
    text = inspect.getsource(textwrap)[:14000]
    chars = sorted(set(text))
    where = {c: i for i, c in enumerate(chars)}
    ids = torch.tensor([where[c] for c in text])
    ids = ids[: len(ids) // LANES * LANES].view(LANES, -1)
    return ids, len(chars)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, letters = lanes_of_text()
    per = LANES // world
    mine = ids[rank * per:(rank + 1) * per]
    torch.manual_seed(8)
    net = DDP(Reader(letters, per), broadcast_buffers=False)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    steps = 0
    for start in range(0, mine.shape[1] - SPAN - 1, SPAN):
        x = mine[:, start:start + SPAN]
        y = mine[:, start + 1:start + SPAN + 1]
        logits = net(x)
        loss = F.cross_entropy(logits.reshape(-1, letters), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        steps += 1
        if steps % 12 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{steps:3d} pieces, {mean.item():.5f} nats a letter", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
