import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

IGNORE = -100


def make_dialogues(n, vocab, seed=0):
    """Prompt tokens are masked out of the loss, answers are a noisy copy of the prompt."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        k = int(torch.randint(3, 16, (1,), generator=g))
        m = int(torch.randint(1, k + 1, (1,), generator=g))
        prompt = torch.randint(2, vocab, (k,), generator=g)
        answer = prompt[:m]
        ids = torch.cat([prompt, torch.tensor([1]), answer])
        labels = torch.cat([torch.full((k,), IGNORE), answer, torch.tensor([0])])
        rows.append((ids, labels))
    return rows


def collate(rows):
    ids = pad_sequence([r[0] for r in rows], batch_first=True)
    labels = pad_sequence([r[1] for r in rows], batch_first=True, padding_value=IGNORE)
    return ids, labels


class TinyLM(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h + self.mlp(h))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = TinyLM(args.vocab)
    fully_shard(model.mlp)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    data = make_dialogues(args.rows, args.vocab)
    per_rank = args.micro // world
    window = args.micro * args.accum
    for epoch in range(args.epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        for at in range(0, len(order) - window + 1, window):
            micros = []
            for k in range(args.accum):
                lo = at + k * args.micro + rank * per_rank
                micros.append(collate([data[i] for i in order[lo:lo + per_rank]]))
            n_tokens = sum((labels != IGNORE).sum() for _, labels in micros)
            dist.all_reduce(n_tokens)
            running = torch.zeros(())
            for k, (ids, labels) in enumerate(micros):
                model.set_requires_gradient_sync(k == args.accum - 1)
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
                loss = loss / n_tokens
                loss.backward()
                running += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            norm = norm.full_tensor().item()
            opt.step()
            opt.zero_grad()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss/token {running.item():.4f} grad norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--rows", type=int, default=256)
    p.add_argument("--vocab", type=int, default=24)
    p.add_argument("--micro", type=int, default=16)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--clip", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()
