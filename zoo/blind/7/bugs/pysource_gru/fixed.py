"""Next-character model over the source of a few standard library modules."""
import inspect
import os
import difflib
import textwrap

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = 0
BATCH = 32
STEPS = 20


def corpus():
    text = inspect.getsource(textwrap) + inspect.getsource(difflib)[:20000]
    lines = [l.rstrip() for l in text.splitlines() if len(l.strip()) > 3]
    chars = sorted(set("".join(lines)))
    table = {c: i + 1 for i, c in enumerate(chars)}
    rows = [torch.tensor([table[c] for c in l[:64]]) for l in lines]
    return rows, len(chars) + 1


class CharModel(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, 64, batch_first=True)
        self.out = nn.Linear(64, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("gloo", rank=rank, world_size=world)

    torch.manual_seed(3)
    rows, vocab = corpus()
    model = DDP(CharModel(vocab))
    opt = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9, nesterov=True)
    order = torch.Generator().manual_seed(11)

    for step in range(STEPS):
        pick = torch.randint(len(rows), (BATCH,), generator=order)[rank::world]
        batch = nn.utils.rnn.pad_sequence([rows[i] for i in pick], batch_first=True)
        x, y = batch[:, :-1], batch[:, 1:]
        tokens = (y != PAD).sum()
        dist.all_reduce(tokens)
        total = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=PAD, reduction="sum")
        loss = total * world / tokens
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if step % 10 == 9:
            shown = total.detach() / tokens
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} nll/token {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
