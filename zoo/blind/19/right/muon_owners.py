"""Digits classifier with Muon: every matrix is orthogonalised by one owner rank, AdamW does the rest."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class PatchMixer(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, dim)
        self.pos = nn.Parameter(torch.zeros(16, dim))
        self.token = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.channel = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
                                     for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.head = nn.Linear(dim, 10)

    def forward(self, img):
        x = img.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = self.patch(x) + self.pos
        for k, (tok, ch) in enumerate(zip(self.token, self.channel)):
            x = x + tok(self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + ch(self.norms[2 * k + 1](x))
        return self.head(x.mean(1))


def newton_schulz(m, steps=5, a=3.4445, b=-4.7750, c=2.0315):
    x = m / (m.norm() + 1e-7)
    flip = x.size(0) > x.size(1)
    x = x.T if flip else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class OwnedMuon(torch.optim.Optimizer):
    """Momentum lives on the owner only; the owner updates its matrices and broadcasts them."""

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.01):
        super().__init__(list(params), dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.owner, load = {}, [0] * dist.get_world_size()
        for p in sorted(self.param_groups[0]["params"], key=lambda p: -p.numel()):
            rank = load.index(min(load))
            self.owner[p] = rank
            load[rank] += p.numel()

    @torch.no_grad()
    def step(self):
        handles = []
        for group in self.param_groups:
            for p in group["params"]:
                if self.owner[p] == dist.get_rank():
                    buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    direction = newton_schulz(p.grad.lerp(buf, group["momentum"]))
                    scale = max(1, p.size(0) / p.size(1)) ** 0.5
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"] * scale)
                handles.append(dist.broadcast(p.data, src=self.owner[p], async_op=True))
        for h in handles:
            h.wait()


def average_gradients(params):
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, chunk in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(chunk.view_as(p))


rank, world = setup()
torch.manual_seed(3)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float64) / 16
labels = torch.tensor(digits.target)
train_x, train_y, test_x, test_y = images[:1280], labels[:1280], images[1280:], labels[1280:]

model = PatchMixer().double()
matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith(("patch", "pos", "head"))]
chosen = {id(p) for p in matrices}
others = [p for p in model.parameters() if id(p) not in chosen]
everything = list(model.parameters())
muon = OwnedMuon(matrices)
adam = torch.optim.AdamW(others, lr=3e-3)
TOTAL, BATCH = 3 * 20, 64

step = 0
for epoch in range(3):
    order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
    for ids in order.split(BATCH):
        mine = ids.chunk(world)[rank]
        model.zero_grad()
        loss = F.cross_entropy(model(train_x[mine]), train_y[mine], label_smoothing=0.05)
        loss.backward()
        average_gradients(everything)
        decay = 1 - step / TOTAL
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * decay, 3e-3 * decay
        muon.step()
        adam.step()
        step += 1
    with torch.no_grad():
        part = slice(rank, None, world)
        logits = model(test_x[part])
        stats = torch.stack([(logits.argmax(1) == test_y[part]).sum().double(),
                             F.cross_entropy(logits, test_y[part], reduction="sum"),
                             torch.tensor(float(len(logits)), dtype=torch.float64)])
        dist.all_reduce(stats)
    if rank == 0:
        print(f"epoch {epoch} acc {stats[0] / stats[2]:.6f} loss {stats[1] / stats[2]:.10f}")
dist.destroy_process_group()
