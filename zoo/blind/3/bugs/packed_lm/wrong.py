import contextlib
import itertools
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


@dataclass
class Config:
    vocab: int = 32
    dim: int = 32
    heads: int = 4
    layers: int = 2
    max_len: int = 32
    sequences: int = 240
    micro_batch: int = 8  # over all processes
    accum: int = 4
    epochs: int = 3
    lr: float = 3e-3
    warmup: int = 4


class MarkovText(Dataset):
    """Sequences of different lengths from a sparse Markov chain."""

    def __init__(self, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.softmax(3 * torch.randn(cfg.vocab, cfg.vocab, generator=g), dim=1)
        self.rows = []
        for _ in range(cfg.sequences):
            length = int(torch.randint(6, cfg.max_len, (1,), generator=g))
            tok = [int(torch.randint(0, cfg.vocab, (1,), generator=g))]
            for _ in range(length):
                tok.append(int(torch.multinomial(table[tok[-1]], 1, generator=g)))
            self.rows.append(torch.tensor(tok))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    x = pad_sequence([r[:-1] for r in rows], batch_first=True, padding_value=0)
    y = pad_sequence([r[1:] for r in rows], batch_first=True, padding_value=-100)
    return x, y


class TinyLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.max_len, cfg.dim)
        layer = nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 4 * cfg.dim, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, cfg.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, x):
        n = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.tok(x) + self.pos(torch.arange(n))
        return self.head(self.norm(self.body(h, mask=mask, is_causal=True)))


def windows(loader, k):
    it = iter(loader)
    while chunk := list(itertools.islice(it, k)):
        yield chunk


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    data = MarkovText(cfg, seed=11)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=cfg.micro_batch // world, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(TinyLM(cfg))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    total = cfg.epochs * math.ceil(len(loader) / cfg.accum)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min((s + 1) / cfg.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * s / total)))

    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for window in windows(loader, cfg.accum):
            tokens = torch.tensor(float(sum((y != -100).sum() for _, y in window)))
            dist.all_reduce(tokens)
            shown = torch.zeros(1)
            for j, (x, y) in enumerate(window):
                ctx = model.no_sync() if j < cfg.accum - 1 else contextlib.nullcontext()
                with ctx:
                    logits = model(x)
                    nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
                    (nll * world / tokens).backward()
                shown += nll.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            dist.all_reduce(shown)
            if rank == 0 and step % 4 == 0:
                print(f"epoch {epoch} step {step:3d} loss {(shown / tokens).item():.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = train(Config())
    if dist.get_rank() == 0:
        n = sum(p.numel() for p in model.parameters())
        print(f"done, {n} parameters")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
