"""Recurrent language model on lines of the standard library, lines of any length, several micro-batches per update."""
import argparse
import contextlib
import difflib
import inspect
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

IGNORE = -100


class LineModel(nn.Module):
    def __init__(self, vocab, dim, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def read_lines(limit):
    kept = []
    for line in inspect.getsource(difflib).splitlines():
        line = line.strip()
        if len(line) > 3:
            kept.append(torch.tensor([2] + [3 + min(ord(c), 127) for c in line[:60]] + [1]))
    return kept[:limit]


def collate(lines):
    ids = pad_sequence([l[:-1] for l in lines], batch_first=True)
    targets = pad_sequence([l[1:] for l in lines], batch_first=True, padding_value=IGNORE)
    return ids, targets


def windows(lines, args, rank, world):
    """Yields lists of micro-batches; one list is one update."""
    g = torch.Generator().manual_seed(args.seed)
    per_update = args.micro_batches * args.micro_size
    for _ in range(args.epochs):
        order = torch.randperm(len(lines), generator=g).tolist()
        for lo in range(0, len(order) - per_update + 1, per_update):
            window = []
            for k in range(args.micro_batches):
                rows = order[lo + k * args.micro_size:lo + (k + 1) * args.micro_size]
                window.append(collate([lines[i] for i in rows[rank::world]]))
            yield window


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--micro-batches", type=int, default=4)
    ap.add_argument("--micro-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    lines = read_lines(800)
    model = DDP(LineModel(131, 24, 48))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for update, window in enumerate(windows(lines, args, rank, world)):
        tokens = torch.zeros(1)
        for _, targets in window:
            tokens += (targets != IGNORE).sum()
            dist.all_reduce(tokens)

        opt.zero_grad(set_to_none=True)
        total = torch.zeros(1)
        for k, (ids, targets) in enumerate(window):
            last = k == len(window) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
                # DDP takes the mean over the processes
                (loss * world / tokens).backward()
            total += loss.detach()
        opt.step()
        dist.all_reduce(total)
        if rank == 0 and update % 6 == 0:
            print(f"update {update:3d}  {int(tokens)} tokens  loss {(total / tokens).item():.4f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
