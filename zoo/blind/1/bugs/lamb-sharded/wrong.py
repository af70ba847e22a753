# Sequence tagging with a tiny transformer; optimizer states live in shards (reduce-scatter / all-gather).
import math

import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
VOCAB, SEQ, DIM, GLOBAL_BATCH, STEPS = 32, 16, 32, 32, 24


class ShardedLAMB:
    def __init__(self, params, lr=2e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        self.lr, self.betas, self.eps, self.wd = lr, betas, eps, weight_decay
        self.params = list(params)
        self.t = 0
        self.state = []
        for p in self.params:
            n = math.ceil(p.numel() / WORLD)
            self.state.append({"n": n, "m": torch.zeros(n), "v": torch.zeros(n)})

    @staticmethod
    def _padded(t, size):
        flat = t.detach().reshape(-1)
        return torch.cat([flat, flat.new_zeros(size - flat.numel())])

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for p, st in zip(self.params, self.state):
            n = st["n"]
            g_full = self._padded(p.grad, n * WORLD)
            g = torch.empty(n)
            dist.reduce_scatter_tensor(g, g_full)
            g /= WORLD
            w = self._padded(p, n * WORLD)[RANK * n:(RANK + 1) * n]
            st["m"].mul_(b1).add_(g, alpha=1 - b1)
            st["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
            m_hat = st["m"] / (1 - b1 ** self.t)
            v_hat = st["v"] / (1 - b2 ** self.t)
            update = m_hat / (v_hat.sqrt() + self.eps) + self.wd * w
            sq = torch.stack([w.pow(2).sum(), update.pow(2).sum()])
            w_norm, u_norm = sq.sqrt().tolist()
            trust = min(w_norm / u_norm, 10.0) if w_norm > 0 and u_norm > 0 else 1.0
            w = w - self.lr * trust * update
            full = torch.empty(n * WORLD)
            dist.all_gather_into_tensor(full, w)
            p.copy_(full[:p.numel()].view_as(p))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(SEQ, DIM) * 0.1)
        layer = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, 4)

    def forward(self, ids):
        return self.out(self.enc(self.tok(ids) + self.pos))


def make_data(n):
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (n, SEQ), generator=g)
    tags = (ids + torch.roll(ids, 1, dims=1)) % 4
    return ids, tags


torch.manual_seed(1234)
model = Tagger()
opt = ShardedLAMB(model.parameters())
ids, tags = make_data(GLOBAL_BATCH * STEPS)
per_rank = GLOBAL_BATCH // WORLD
for step in range(STEPS):
    lo = step * GLOBAL_BATCH + RANK * per_rank
    xb, yb = ids[lo:lo + per_rank], tags[lo:lo + per_rank]
    loss = nn.functional.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if RANK == 0 and step % 6 == 0:
        print(f"step {step:3d}  loss {mean.item() / WORLD:.4f}", flush=True)
if RANK == 0:
    torch.save(model.state_dict(), "tagger.pt")
    print("saved tagger.pt")
dist.destroy_process_group()
