"""Direct preference optimisation of a very small language model.

Stage 1 teaches the model (supervised) to continue a prompt of digits with the same
digits in rising order; stage 2 starts from it and prefers the rising continuation to
a shuffled one (DPO, reference model = frozen copy of stage 1). DDP throughout.
"""
import copy
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PAD, SEP, VOCAB, WIDTH, BETA, BATCH = 10, 11, 12, 32, 0.3, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(24, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places.weight[:ids.shape[1]])))


def pairs(n):
    rng = np.random.default_rng(4)
    rows = []
    for _ in range(n):
        prompt = rng.integers(0, 10, int(rng.integers(4, 10)))
        good, bad = np.sort(prompt), rng.permutation(prompt)
        while (bad == good).all():
            bad = rng.integers(0, 10, len(prompt))
        rows.append([torch.tensor(np.concatenate([prompt, [SEP], end])) for end in (good, bad)])
    return rows


def collate(rows):
    # padded to the longest of this process's rows
    return pad_sequence([r[0] for r in rows] + [r[1] for r in rows], batch_first=True, padding_value=PAD)


def answer_logps(model, ids):
    logp = F.log_softmax(model(ids[:, :-1]), -1).gather(2, ids[:, 1:, None])[..., 0]
    after = (ids == SEP).cumsum(1)[:, :-1] > 0
    mask = after & (ids[:, 1:] != PAD)
    return (logp * mask).sum(1), mask.sum(1)


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    os.environ.setdefault("MASTER_ADDR", "localhost"), os.environ.setdefault("MASTER_PORT", "29612")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(1234 + rank)
    model = DDP(Tiny(), gradient_as_bucket_view=True)
    data = pairs(384)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, BATCH // world, sampler=sampler, collate_fn=collate)

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in loader:
            good = ids[: len(ids) // 2]
            logps, counts = answer_logps(model, good)
            stats = torch.stack([counts.sum().float(), -logps.detach().sum()])
            dist.all_reduce(stats)
            (-logps.sum() * world / stats[0]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"supervised {epoch}: loss of a digit {stats[1] / stats[0]:.4f}")

    reference = copy.deepcopy(model.module).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    for epoch in range(2, 4):
        sampler.set_epoch(epoch)
        seen = torch.zeros(3)
        for ids in loader:
            half = len(ids) // 2
            policy, _ = answer_logps(model, ids)
            with torch.no_grad():
                anchor, _ = answer_logps(reference, ids)
            reward = BETA * (policy - anchor)
            margin = reward[:half] - reward[half:]
            loss = -F.logsigmoid(margin).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            seen += torch.stack([loss.detach() * half, margin.detach().sum(), torch.tensor(float(half))])
        dist.reduce(seen, dst=0)
        if rank == 0:
            print(f"preference {epoch - 2}: loss {seen[0] / seen[2]:.4f}, margin {seen[1] / seen[2]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
