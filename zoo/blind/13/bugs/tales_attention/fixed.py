"""A small attention language model on generated tales; gradients are exchanged by hand."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WHO = ["fox", "hen", "king", "girl", "wolf", "miller"]
DID = ["saw", "met", "fed", "sold", "lost"]
HOW = ["gladly", "late", "twice", "never", "again"]


def tales(count, seed):
    words = ["<s>", "the", "and", "."] + WHO + DID + HOW
    number = {w: i for i, w in enumerate(words)}
    g = torch.Generator().manual_seed(seed)
    pick = lambda of: of[int(torch.randint(len(of), (1,), generator=g))]
    rows = []
    for _ in range(count):
        a = pick(WHO)
        text = ["<s>"]
        for _ in range(2):
            b = pick(WHO)
            text += ["the", a, pick(DID), "the", b, pick(HOW), "."]
            a = b
        rows.append([number[w] for w in text])
    return torch.tensor(rows), len(words)


class Tales(nn.Module):
    def __init__(self, vocab, length, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 64)
        self.down = nn.Linear(64, width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(width))
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        q, k, v = self.qkv(h).unsqueeze(1).chunk(3, dim=-1)
        h = h + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head(h)


def exchange(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.15)
    args = ap.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    data, vocab = tales(256, seed=2)
    model = Tales(vocab, data.shape[1])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    g = torch.Generator().manual_seed(6)

    for step in range(args.steps):
        rows = torch.randint(len(data), (args.batch,), generator=g)[rank::world]
        x, y = data[rows, :-1], data[rows, 1:]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / (args.batch * y.shape[1])
        opt.zero_grad()
        loss.backward()
        exchange(model)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {shown:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
