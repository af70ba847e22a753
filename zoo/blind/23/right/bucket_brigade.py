"""Digit recogniser; the gradient travels round a ring of neighbours, piece by piece (our switch hates all-to-one traffic)."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

if "RANK" in os.environ:
    dist.init_process_group("gloo")
    RANK, WORLD = dist.get_rank(), dist.get_world_size()
else:
    RANK, WORLD = 0, 1

BATCH, STEPS, SEED = 64, 48, 3
LEFT, RIGHT = (RANK - 1) % WORLD, (RANK + 1) % WORLD


def pass_on(out, into):
    """Hand `out` to the right while taking `into` from the left."""
    s = dist.isend(out, RIGHT)
    r = dist.irecv(into, LEFT)
    s.wait()
    r.wait()


def ring_sum(vec):
    """Sum of `vec` over the ring: a reduce-scatter lap, then an all-gather lap."""
    if WORLD == 1:
        return vec
    n = vec.numel()
    piece = -(-n // WORLD)
    pad = torch.zeros(piece * WORLD)
    pad[:n] = vec
    pieces = list(pad.view(WORLD, piece).unbind(0))
    box = torch.empty(piece)
    for hop in range(WORLD - 1):
        give, take = (RANK - hop) % WORLD, (RANK - hop - 1) % WORLD
        pass_on(pieces[give].contiguous(), box)
        pieces[take].add_(box)
    for hop in range(WORLD - 1):
        give, take = (RANK + 1 - hop) % WORLD, (RANK - hop) % WORLD
        pass_on(pieces[give].contiguous(), box)
        pieces[take].copy_(box)
    return torch.cat(pieces)[:n]


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.mix = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.out = nn.Linear(12 * 16, 10)

    def forward(self, img):
        h = F.gelu(self.conv(img))
        h = F.gelu(self.mix(h))
        return self.out(h.flatten(1))


bunch = load_digits()
images = torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(bunch.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
fit, held = shuffled[:1536], shuffled[1536:]

torch.manual_seed(SEED)
model = Recogniser()
params = list(model.parameters())
optim = torch.optim.Adam(params, lr=3e-3, eps=1e-6)

step = 0
while step < STEPS:
    lap = step // (len(fit) // BATCH)
    order = fit[torch.randperm(len(fit), generator=torch.Generator().manual_seed(SEED + 17 * lap))]
    for batch in order.split(BATCH):
        share = BATCH // WORLD
        idx = batch[RANK * share:(RANK + 1) * share]
        loss = F.cross_entropy(model(images[idx]), labels[idx])
        grads = torch.autograd.grad(loss, params)
        packed = torch.cat([g.reshape(-1) for g in grads] + [loss.detach().reshape(1)])
        packed = ring_sum(packed) / WORLD
        for p, g in zip(params, packed[:-1].split([p.numel() for p in params])):
            p.grad = g.view_as(p).clone()
        optim.step()
        step += 1
        if RANK == 0 and step % 8 == 0:
            print(f"step {step:3d}  loss {packed[-1].item():.6f}  |g| {packed[:-1].norm().item():.5f}", flush=True)
        if step == STEPS:
            break

with torch.no_grad():
    piece = held.tensor_split(WORLD)[RANK]
    right = (model(images[piece]).argmax(1) == labels[piece]).sum().float().reshape(1)
score = ring_sum(torch.cat([right, torch.tensor([float(len(piece))])]))
if RANK == 0:
    print(f"held-out accuracy {score[0].item() / score[1].item():.4f}  on {int(score[1])}", flush=True)
if dist.is_initialized():
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
