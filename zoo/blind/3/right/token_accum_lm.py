"""Next-token training on padded sequences of varying length, with accumulation normalised by the tokens of the whole update."""
import argparse
import contextlib
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, VOCAB = 0, 32


class Walks(Dataset):
    """Sequences from a sparse Markov chain."""

    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(1, VOCAB, (VOCAB, 3), generator=g)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(5, 30, (1,), generator=g))
            tok = [int(torch.randint(1, VOCAB, (1,), generator=g))]
            for c in torch.randint(0, 3, (length,), generator=g).tolist():
                tok.append(int(table[tok[-1], c]))
            self.rows.append(torch.tensor(tok))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return batch[:, :-1], batch[:, 1:]


class GRULM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def windows(loader, k):
    buf = []
    for item in loader:
        buf.append(item)
        if len(buf) == k:
            yield buf
            buf = []
    if buf:
        yield buf


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--accum", type=int, default=3)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-3)
    a = p.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Walks(400)
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=a.micro_batch, sampler=sampler, collate_fn=collate)
    torch.manual_seed(9)
    model = DDP(GRULM())
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    per_epoch = -(-len(loader) // a.accum)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4) * max(0.1, 1 - s / (a.epochs * per_epoch)))

    step = 0
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for win in windows(loader, a.accum):
            tokens = torch.tensor(sum(int((t != PAD).sum()) for _, t in win))
            dist.all_reduce(tokens)
            shown = torch.zeros(())
            for i, (x, t) in enumerate(win):
                last = i == len(win) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(x)
                    nll = F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=PAD, reduction="sum")
                    (nll * world / tokens).backward()
                shown += nll.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            sched.step()
            step += 1
            dist.all_reduce(shown)
            if rank == 0 and step % 6 == 0:
                print(f"step {step} loss/token {shown.item() / tokens.item():.5f} tokens {tokens.item()} lr {sched.get_last_lr()[0]:.5f}")

    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
