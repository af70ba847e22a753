"""
Sequence to sequence with attention, gradient accumulation normalised by the number of target tokens.

Note on reproducibility: dropout masks are drawn by each process from its own stream (seed + rank), so runs on
different numbers of processes agree in distribution only. With --dropout 0 they agree up to rounding.
"""
import argparse
import math
import os
import random
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30129")
PAD, BOS, EOS = 0, 1, 2
WORDS = "zero one two three four five six seven eight nine".split()


def make_pairs(n, seed):
    """'407' -> 'four zero seven', on characters"""
    rnd = random.Random(seed)
    pairs = []
    for _ in range(n):
        s = "".join(rnd.choice("0123456789") for _ in range(rnd.choice((1, 1, 2, 2, 3, 4))))
        t = " ".join(WORDS[int(c)] for c in s)
        pairs.append(([ord(c) - ord("0") + 3 for c in s], [BOS] + [3 if c == " " else ord(c) - ord("a") + 4 for c in t] + [EOS]))
    return pairs


def collate(pairs):
    pad = lambda rows: torch.tensor([r + [PAD] * (max(map(len, rows)) - len(r)) for r in rows])
    return pad([p[0] for p in pairs]), pad([p[1] for p in pairs])


class Seq2Seq(nn.Module):
    def __init__(self, dim=32, dropout=0.1):
        super().__init__()
        self.src, self.tgt = nn.Embedding(13, dim, padding_idx=PAD), nn.Embedding(30, dim, padding_idx=PAD)
        self.enc = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(2 * dim, 30)
        self.drop = nn.Dropout(dropout)

    def forward(self, src, tgt):
        memory, _ = self.enc(self.drop(self.src(src)))
        mask = (src != PAD).unsqueeze(1)
        h, _ = self.dec(self.drop(self.tgt(tgt)), (memory * mask.transpose(1, 2)).sum(1).unsqueeze(0) / mask.sum(2).unsqueeze(0))
        score = (h @ memory.transpose(1, 2) / math.sqrt(h.size(-1))).masked_fill(~mask, -1e9)
        return self.out(self.drop(torch.cat([h, score.softmax(-1) @ memory], -1)))


def token_loss(model, batch):
    src, tgt = batch
    logits = model(src, tgt[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


@torch.no_grad()
def perplexity(net, pairs):
    rank, world = dist.get_rank(), dist.get_world_size()
    net.eval()
    batch = collate(pairs[rank::world])
    s = torch.stack([token_loss(net, batch), (batch[1][:, 1:] != PAD).sum().float()])
    net.train()
    dist.all_reduce(s)
    return math.exp(s[0] / s[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--micro-batch", type=int, default=12)
    ap.add_argument("--micro-batches-per-step", type=int, default=4, help="over all processes")
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Seq2Seq(dropout=args.dropout)
    model = DDP(net)
    torch.manual_seed(args.seed + rank)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-6)
    train, dev = make_pairs(960, 0), make_pairs(100, 1)
    accum = args.micro_batches_per_step // world
    step = 0
    for epoch in range(3):
        order = list(range(len(train)))
        random.Random(epoch).shuffle(order)
        micro = [order[i:i + args.micro_batch] for i in range(0, len(order), args.micro_batch)][rank::world]
        for k in range(0, len(micro), accum):
            batches = [collate([train[i] for i in ids]) for ids in micro[k:k + accum]]
            num_items_in_batch = torch.tensor(sum(int((t[:, 1:] != PAD).sum()) for _, t in batches))
            dist.all_reduce(num_items_in_batch)
            for j, b in enumerate(batches):
                # DDP divides by the number of processes, the token count is global: undo one of the two
                loss = token_loss(model if j == len(batches) - 1 else net, b) * world / num_items_in_batch
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            step += 1
        ppl = perplexity(net, dev)
        if rank == 0:
            print(f"epoch {epoch} step {step} dev perplexity {ppl:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
