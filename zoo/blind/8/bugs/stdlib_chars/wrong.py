import argparse
import os
import string
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def setup():
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29814"}
    for k, v in defaults.items():
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


class Encoder(nn.Module):
    def __init__(self, vocab, dim, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)

    def forward(self, ids):
        return self.rnn(self.embed(ids))[0]


class Decoder(nn.Module):
    def __init__(self, vocab, dim, hidden):
        super().__init__()
        self.proj = nn.Linear(hidden, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, h):
        return self.out(self.proj(h))


class Model(nn.Module):
    def __init__(self, vocab, dim=24, hidden=32):
        super().__init__()
        self.encoder = Encoder(vocab, dim, hidden)
        self.decoder = Decoder(vocab, dim, hidden)
        self.decoder.out.weight = self.encoder.embed.weight

    def forward(self, ids):
        return self.decoder(self.encoder(ids))


def sum_gradients(modules):
    for module in modules:
        for p in module.parameters():
            dist.all_reduce(p.grad)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=90)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--length", type=int, default=24)
    args = ap.parse_args()
    rank, world = setup()

    with open(string.__file__) as f:
        text = f.read()
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    cut = len(ids) - 1000

    torch.manual_seed(21)
    model = Model(len(letters))
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
    gen = torch.Generator().manual_seed(4)
    for step in range(args.steps):
        starts = torch.randint(cut - args.length - 1, (args.batch,), generator=gen)[rank::world]
        rows = torch.stack([ids[s:s + args.length + 1] for s in starts])
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        loss = loss / (args.batch * args.length)
        opt.zero_grad()
        loss.backward()
        sum_gradients([model.encoder, model.decoder])
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        if step % 15 == 14:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1}  nll {total.item():.5f}")

    with torch.no_grad():
        tail = ids[cut:].view(1, -1)
        nll = F.cross_entropy(model(tail[:, :-1])[0], tail[0, 1:])
    if rank == 0:
        print(f"tail nll {nll.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
