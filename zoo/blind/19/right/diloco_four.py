"""DiLoCo with four workers, however many processes carry them: local AdamW, outer Nesterov on the mean drift."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

WORKERS, INNER, ROUNDS, BATCH = 4, 6, 8, 16
INNER_LR, OUTER_LR, OUTER_MOMENTUM = 4e-3, 0.7, 0.9
VOCAB, WINDOW = 12, 6


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.net = nn.Sequential(nn.Linear(16 * WINDOW, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, VOCAB))

    def forward(self, ids):
        return self.net(self.embed(ids).flatten(1))


def corpus(worker, n=1500):
    """Each worker has its own dialect: the same grammar with other probabilities."""
    g = torch.Generator().manual_seed(60 + worker)
    seq = torch.randint(0, VOCAB, (WINDOW,), generator=g).tolist()
    coin = torch.rand(n, generator=g) < 0.1 * (worker + 1)
    jump = torch.randint(0, VOCAB, (n,), generator=g)
    for k in range(n):
        seq.append(int(jump[k]) if coin[k] and k % 3 == 0 else (seq[-1] + seq[-3] + 1) % VOCAB)
    return torch.tensor(seq).unfold(0, WINDOW + 1, 1)


class Worker:
    """Own data, own random stream, own inner optimizer that lives through all rounds."""

    def __init__(self, number, params):
        self.number = number
        self.windows = corpus(number)
        self.g = torch.Generator().manual_seed(4000 + number)
        self.params = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
        self.opt = torch.optim.AdamW(self.params.values(), lr=INNER_LR, weight_decay=0.1)

    def train(self, skeleton, params, lr):
        with torch.no_grad():
            for k, v in params.items():
                self.params[k].copy_(v)
        self.opt.param_groups[0]["lr"] = lr
        total = 0.0
        for _ in range(INNER):
            rows = self.windows[torch.randint(0, len(self.windows), (BATCH,), generator=self.g)]
            loss = F.cross_entropy(functional_call(skeleton, self.params, rows[:, :-1]), rows[:, -1])
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.params.values(), 1.0)
            self.opt.step()
            total += loss.item()
        return total / INNER


class Outer:
    def __init__(self, params):
        self.params = params
        self.opt = torch.optim.SGD(params.values(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)

    def step(self, workers, distributed):
        for k, v in self.params.items():
            drift = torch.zeros_like(v)
            for w in workers:
                drift += v.detach() - w.params[k].detach()
            if distributed:
                dist.all_reduce(drift)
            v.grad = drift / WORKERS
        self.opt.step()


@torch.no_grad()
def validate(skeleton, params, rows, rank, world):
    part = rows[rank::world]
    logits = functional_call(skeleton, params, part[:, :-1])
    s = torch.stack([F.cross_entropy(logits, part[:, -1], reduction="sum"),
                     (logits.argmax(1) == part[:, -1]).sum().double(), torch.tensor(float(len(part)))])
    if world > 1:
        dist.all_reduce(s)
    return (s[:2] / s[2]).tolist()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if WORKERS % world:
        raise SystemExit(f"{WORKERS} workers cannot be dealt evenly to {world} processes")
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(77)
    skeleton = Predictor()
    params = {k: p for k, p in skeleton.named_parameters()}
    outer = Outer(params)
    workers = [Worker(k, params) for k in range(rank, WORKERS, world)]
    held = corpus(2, 2300)[-401:]

    for round_ in range(ROUNDS):
        lr = INNER_LR * min(1.0, (round_ + 1) / 3)
        losses = torch.zeros(WORKERS)
        for w in workers:
            losses[w.number] = w.train(skeleton, params, lr)
        outer.step(workers, world > 1)
        if world > 1:
            dist.all_reduce(losses)
        if round_ % 2:
            loss, acc = validate(skeleton, params, held, rank, world)
            if rank == 0:
                inner = " ".join(f"{v:.8f}" for v in losses.tolist())
                print(f"round {round_} inner {inner} held-out {loss:.10f} acc {acc:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
