"""Character model of Python names; words are dealt to the workers by length, back and forth, so that all get equal work."""
import builtins
import keyword
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD, END = 0, 1


def corpus():
    words = set(sys.stdlib_module_names) | set(keyword.kwlist) | set(dir(builtins)) | set(dir(str)) | set(dir(os))
    words = sorted(w.lower() for w in words if len(w) > 2)
    letters = sorted({c for w in words for c in w})
    table = {c: i + 2 for i, c in enumerate(letters)}
    return [torch.tensor([table[c] for c in w] + [END]) for w in words], len(letters) + 2


def snake(ids, lengths, world):
    """Longest first, dealt 0..W-1 and then W-1..0."""
    hands = [[] for _ in range(world)]
    for place, i in enumerate(sorted(ids, key=lambda i: (-lengths[i], i))):
        turn, seat = divmod(place, world)
        hands[seat if turn % 2 == 0 else world - 1 - seat].append(i)
    return hands


def collate(seqs):
    y = nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=PAD)
    x = F.pad(y, (1, 0), value=END)[:, :-1]
    return x, y


class NameModel(nn.Module):
    def __init__(self, vocab, dim=24, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x):
        return self.out(self.gru(self.embed(x))[0])


def nll(model, seqs):
    x, y = collate(seqs)
    return F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=PAD, reduction="sum"), int((y != PAD).sum())


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    words, vocab = corpus()
    lengths = [len(w) for w in words]
    everyone = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    held, pool = everyone[:64], everyone[64:]

    torch.manual_seed(42)
    model = DDP(NameModel(vocab))
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    batch, done, my_tokens = 32, 0, 0

    for epoch in range(4):
        g = torch.Generator().manual_seed(900 + epoch)
        order = [pool[j] for j in torch.randperm(len(pool), generator=g)]
        for k in range(0, min(len(order) - batch + 1, 12 * batch), batch):
            hand = snake(order[k:k + batch], lengths, world)[rank]
            loss, tokens = nll(model, [words[i] for i in hand])
            count = torch.tensor([tokens])
            dist.all_reduce(count)
            opt.zero_grad()
            (loss * world / count.item()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            done += 1
            my_tokens += tokens
            seen = loss.detach().clone()
            dist.all_reduce(seen)
            if rank == 0 and done % 6 == 0:
                print(f"step {done}: {seen.item() / count.item():.5f} nats per letter, {count.item()} letters", flush=True)

    print(f"(worker {rank} went through {my_tokens} letters)", flush=True)
    model.eval()
    with torch.no_grad():
        part = held[rank::world]
        a, b = nll(model.module, [words[i] for i in part])
    both = torch.tensor([a.item(), b], dtype=torch.float64)
    dist.all_reduce(both)
    if rank == 0:
        print(f"held-out perplexity {torch.exp(both[0] / both[1]).item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
