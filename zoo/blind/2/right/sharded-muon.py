"""Orthogonalised momentum; every process owns some matrices, computes their update and shares the result."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SEQ, VOCAB = 24, 20
BATCH = int(os.environ.get("BATCH", 16))
STEPS = 30


def newton_schulz(g, rounds=5):
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.t() if flip else x
    for _ in range(rounds):
        a = x @ x.t()
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.t() if flip else x


class ShardedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        params = sorted(params, key=lambda p: p.numel(), reverse=True)
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def step(self):
        g = self.param_groups[0]
        pending = []
        for i, p in enumerate(g["params"]):
            owner = i % self.world
            if owner == self.rank:
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.mul_(g["momentum"]).add_(p.grad)
                u = newton_schulz(p.grad + g["momentum"] * buf)
                p.add_(u, alpha=-g["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))
            pending.append(dist.broadcast(p.data, src=owner, async_op=True))
        for w in pending:
            w.wait()


class GRULM(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.GRU(d, d, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, t):
        return self.out(self.norm(self.rnn(self.emb(t))[0]))


def markov(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.softmax(3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)), 1)
    seq = [torch.randint(0, VOCAB, (n,), generator=g)]
    for _ in range(SEQ):
        seq.append(torch.multinomial(table[seq[-1]], 1, generator=g).squeeze(1))
    return torch.stack(seq, 1)


def nll(model, seq):
    return F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data, held_out = markov(BATCH * world * STEPS, 1), markov(120, 2)
torch.manual_seed(6)
model = DDP(GRULM())
hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "emb" not in n and "out" not in n]
ids = {id(p) for p in hidden}
others = [p for p in model.parameters() if id(p) not in ids]
opts = [ShardedMuon(hidden, lr=0.02), torch.optim.AdamW(others, lr=4e-3, weight_decay=0.0)]
scheds = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: max(0.1, min(1.0, 2 * (1 - s / STEPS)))) for o in opts]

for step, global_batch in enumerate(data.split(BATCH * world)):
    loss = nll(model, global_batch[rank::world])
    loss.backward()
    for o, s in zip(opts, scheds):
        o.step()
        s.step()
        o.zero_grad(set_to_none=True)
    if step % 10 == 9:
        with torch.no_grad():
            part = held_out[rank::world]
            acc = torch.tensor([nll(model.module, part).item() * len(part), len(part)])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"step {step + 1} lr {scheds[0].get_last_lr()[0]:.4f} held-out nll {acc[0] / acc[1]:.4f}")

shards = [None] * world
dist.all_gather_object(shards, {i: opts[0].state[p]["buf"] for i, p in enumerate(opts[0].param_groups[0]["params"])
                                if p in opts[0].state})
if rank == 0:
    momentum = {k: v for part in shards for k, v in part.items()}
    torch.save({"model": model.module.state_dict(), "muon": momentum, "adamw": opts[1].state_dict()}, "/tmp/muon_lm.pt")
    print("checkpoint holds", len(momentum), "momentum buffers")
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
