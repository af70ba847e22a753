"""Character model on subtitle lines of very different length, trained with gradient accumulation."""
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, LONGEST, PAD = 24, 30, -100


def make_lines(count, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=g), dim=1)
    lines = torch.full((count, LONGEST + 1), PAD)
    lengths = 2 + (LONGEST - 2) * torch.rand(count, generator=g) ** 3
    for i, n in enumerate(lengths.long().tolist()):
        c = int(torch.randint(VOCAB, (1,), generator=g))
        for t in range(n + 1):
            lines[i, t] = c
            c = int(torch.multinomial(table[c], 1, generator=g))
    return lines


class LineModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x.clamp(min=0)))[0])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=32, help="lines in an optimizer step")
    p.add_argument("--micro", type=int, default=4, help="lines that fit in memory at once")
    p.add_argument("--lr", type=float, default=0.1)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    lines = make_lines(320, seed=5)
    model = DDP(LineModel())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    rounds = args.batch // (args.micro * world)

    for epoch in range(args.epochs):
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(epoch))
        seen = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(order), args.batch):
            mine = lines[order[start:start + args.batch][rank::world]]
            tokens = (mine[:, 1:] != PAD).sum()
            dist.all_reduce(tokens)
            opt.zero_grad()
            for k in range(rounds):
                part = mine[k * args.micro:(k + 1) * args.micro]
                last = k == rounds - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(part[:, :-1])
                    target = part[:, 1:]
                    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
                    (total * world / tokens).backward()
                seen += torch.tensor([total.item(), (target != PAD).sum().item()], dtype=torch.float64)
            opt.step()
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} nats per character {seen[0] / seen[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
