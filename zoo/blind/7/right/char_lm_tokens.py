"""Character model over docstrings; gradients are accumulated over micro-batches of different lengths."""
import contextlib
import inspect
import os
import statistics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUM = 3
BATCH = 16
UPDATES = 12


def load_rows():
    text = inspect.getsource(statistics)
    lines = [l.strip() for l in text.splitlines() if len(l.strip()) > 5]
    chars = sorted(set("".join(lines)))
    table = {c: i + 1 for i, c in enumerate(chars)}
    return [torch.tensor([table[c] for c in l[:48]]) for l in lines], len(chars) + 1


class LM(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.rnn = nn.LSTM(32, 64, batch_first=True)
        self.out = nn.Linear(64, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29701").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, vocab = load_rows()
    torch.manual_seed(1234 + rank)
    model = DDP(LM(vocab))
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    gen = torch.Generator().manual_seed(3)

    for update in range(UPDATES):
        micro = []
        for _ in range(ACCUM):
            ids = torch.randint(len(rows), (BATCH,), generator=gen)[rank::world]
            b = nn.utils.rnn.pad_sequence([rows[i] for i in ids], batch_first=True)
            micro.append((b[:, :-1], b[:, 1:]))
        tokens = torch.tensor(float(sum((y != 0).sum().item() for _, y in micro)))
        dist.all_reduce(tokens)
        total = 0.0
        for k, (x, y) in enumerate(micro):
            with model.no_sync() if k + 1 < ACCUM else contextlib.nullcontext():
                nll = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0, reduction="sum")
                (nll * world / tokens).backward()
            total += nll.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and update % 4 == 3:
            print(f"update {update + 1} nll per character {(total / tokens).item():.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
