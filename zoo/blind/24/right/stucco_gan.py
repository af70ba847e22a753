"""Hinge GAN on three plaster colours, gradients reduced by hand in one flat bucket.

The noise of the whole batch is drawn everywhere and each process keeps its strip. The
generator's backward also fills the critic's gradients; they are thrown away, never reduced."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors as flatten, _unflatten_dense_tensors as unflatten

BATCH, LATENT = 96, 4
world = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group(backend="gloo")


def mlp(i, o, act):
    return torch.nn.Sequential(torch.nn.Linear(i, 32), act, torch.nn.Linear(32, 32), act, torch.nn.Linear(32, o))


def sum_gradients(net):
    grads = [p.grad for p in net.parameters()]
    bucket = flatten(grads)
    if world > 1:
        dist.all_reduce(bucket)
    for g, new in zip(grads, unflatten(bucket, grads)):
        g.copy_(new)


def strip(t):
    return t.chunk(world)[rank]


def plaster(gen):
    which = torch.randint(3, (BATCH,), generator=gen)
    centres = torch.tensor([[1.0, 0.2, -0.5], [-0.6, 0.8, 0.1], [0.1, -0.9, 0.7]])
    return centres[which] + 0.08 * torch.randn(BATCH, 3, generator=gen)


torch.manual_seed(31)
G = mlp(LATENT, 3, torch.nn.LeakyReLU(0.2))
D = mlp(3, 1, torch.nn.LeakyReLU(0.2))
shadow = [p.detach().clone() for p in G.parameters()]
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=4e-3, betas=(0.5, 0.99))
gen = torch.Generator().manual_seed(600)

for it in range(20):
    for _ in range(2):
        real = strip(plaster(gen)).requires_grad_()
        fake = G(strip(torch.randn(BATCH, LATENT, generator=gen))).detach()
        out = D(real)
        slope, = torch.autograd.grad(out.sum(), real, create_graph=True)
        loss_d = (F.relu(1 - out).sum() + F.relu(1 + D(fake)).sum() + 0.5 * slope.square().sum()) / BATCH
        opt_d.zero_grad()
        loss_d.backward()
        sum_gradients(D)
        opt_d.step()
    loss_g = -D(G(strip(torch.randn(BATCH, LATENT, generator=gen)))).sum() / BATCH
    opt_g.zero_grad()
    loss_g.backward()
    sum_gradients(G)
    opt_g.step()
    with torch.no_grad():
        for s, p in zip(shadow, G.parameters()):
            s.lerp_(p, 0.2)
    both = torch.stack([loss_d.detach(), loss_g.detach()])
    if world > 1:
        dist.all_reduce(both)
    if rank == 0 and (it + 1) % 5 == 0:
        print("iteration %2d  critic %.5f  generator %.5f" % (it + 1, *both.tolist()), flush=True)

with torch.no_grad():
    for p, s in zip(G.parameters(), shadow):            # the average draws the samples
        p.copy_(s)
if rank == 0:
    with torch.no_grad():
        sample = G(torch.randn(500, LATENT, generator=torch.Generator().manual_seed(0)))
    print("mean colour", " ".join(f"{c:+.4f}" for c in sample.mean(0).tolist()))
time.sleep(0.3)
if world > 1:
    dist.destroy_process_group()
