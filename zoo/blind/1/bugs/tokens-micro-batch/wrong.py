import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

PAD = 0


class CharGRU(nn.Module):
    def __init__(self, vocab=30, dim=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.gru(self.embed(ids))
        return self.out(h)


def make_corpus(n, vocab=30):
    g = torch.Generator().manual_seed(21)
    docs = []
    for _ in range(n):
        length = int(torch.randint(4, 28, (1,), generator=g)) if torch.rand(1, generator=g) < 0.7 else 6
        start = int(torch.randint(1, vocab, (1,), generator=g))
        step = 1 if length > 12 else 3
        docs.append((start - 1 + step * torch.arange(length)) % (vocab - 1) + 1)
    return docs


def micro_batches(docs, size, epoch, rank, world):
    order = torch.randperm(len(docs), generator=torch.Generator().manual_seed(epoch)).tolist()
    order = order[: len(order) // (size * world) * size * world]
    for i in range(rank * size, len(order), size * world):
        ids = pad_sequence([docs[j] for j in order[i:i + size]], batch_first=True, padding_value=PAD)
        yield ids[:, :-1], ids[:, 1:]


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4, help="documents per process and micro-batch")
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    docs = make_corpus(384)
    model = DistributedDataParallel(CharGRU())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    step = 0
    for epoch in range(args.epochs):
        batches = list(micro_batches(docs, args.micro_batch, epoch, rank, world))
        for first in range(0, len(batches), args.accum):
            window = batches[first:first + args.accum]
            tokens = torch.tensor(float(sum((y != PAD).sum() for _, y in window)))
            shown = 0.0
            for k, (x, y) in enumerate(window):
                last = k == len(window) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = token_loss(model(x), y) / tokens
                    loss.backward()
                shown += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if rank == 0 and step % 6 == 0:
                print(f"step {step} loss/token {shown:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
