"""Sentences of very different length, dealt to the ranks by token count instead of by number."""
import argparse
import inspect
import re
import time
import statistics

import torch
import torch.distributed as dist
from torch import nn


def sentences():
    text = inspect.getsource(statistics)
    found = [re.findall(r"\w+|[^\w\s]", s) for s in text.split("\n\n")]
    found = [s[:40] for s in found if len(s) > 4]
    count = {}
    for s in found:
        for w in s:
            count[w] = count.get(w, 0) + 1
    known = sorted(count, key=lambda w: (-count[w], w))[:298]
    number = {w: i + 2 for i, w in enumerate(known)}
    return [torch.tensor([number.get(w, 1) for w in s]) for s in found]


def deal(lengths, world):
    """Longest first, always to the rank that has the fewest tokens."""
    load, parts = [0] * world, [[] for _ in range(world)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        r = load.index(min(load))
        parts[r].append(i)
        load[r] += lengths[i]
    return parts


class Tagger(nn.Module):
    def __init__(self, vocab=300, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def nll(self, group):
        padded = nn.utils.rnn.pad_sequence(group, batch_first=True)
        logits = self.out(self.rnn(self.emb(padded[:, :-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), padded[:, 1:].flatten(), ignore_index=0,
                                           reduction="sum")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--sentences", type=int, default=15)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = sentences()
    torch.manual_seed(66)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    g = torch.Generator().manual_seed(3)
    for step in range(args.steps):
        chosen = [data[i] for i in torch.randperm(len(data), generator=g)[:args.sentences].tolist()]
        mine = [chosen[i] for i in deal([len(s) for s in chosen], world)[rank]]
        opt.zero_grad()
        loss = model.nll(mine)
        loss.backward()
        pack = torch.tensor([loss.item(), sum(len(s) - 1 for s in mine)])
        dist.all_reduce(pack)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(pack[1])
        opt.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1}: rank 0 had {len(mine)} sentences, nll {(pack[0] / pack[1]).item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
