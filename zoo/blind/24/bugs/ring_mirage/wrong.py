"""A GAN that learns eight blobs on a ring. Gradients are averaged by hand."""
import math, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus

distributed = "LOCAL_RANK" in os.environ
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0
world = dist.get_world_size() if distributed else 1

BATCH, LATENT, ROUNDS, SEED = 128, 6, 40, 1234


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def ring(n, gen):
    k = torch.randint(0, 8, (n,), generator=gen)
    a = k * (2 * math.pi / 8)
    return torch.stack([a.cos(), a.sin()], 1) * 2 + 0.1 * torch.randn(n, 2, generator=gen)


def local(t):
    """This process's part of a global batch."""
    return t.chunk(world)[rank]


def sync_grads(module):
    if not distributed:
        return
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


torch.manual_seed(SEED)
G = mlp(LATENT, 48, 48, 2)
D = mlp(2, 48, 48, 1)
opt_g = torch.optim.SGD(G.parameters(), lr=0.05)
opt_d = torch.optim.SGD(D.parameters(), lr=0.05)
data_gen = torch.Generator().manual_seed(SEED + 1)
noise_gen = torch.Generator().manual_seed(SEED + 2)


def sample_noise():
    return torch.randn(BATCH // world, LATENT, generator=noise_gen)


for it in range(ROUNDS):
    real = local(ring(BATCH, data_gen))

    fake = G(sample_noise()).detach()
    loss_d = softplus(-D(real)).mean() + softplus(D(fake)).mean()
    opt_d.zero_grad()
    loss_d.backward()
    sync_grads(D)
    opt_d.step()

    loss_g = softplus(-D(G(sample_noise()))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    sync_grads(G)
    opt_g.step()

    if (it + 1) % 10 == 0:
        report = torch.stack([loss_d.detach(), loss_g.detach()])
        if distributed:
            dist.all_reduce(report)
        if rank == 0:
            d, g = (report / world).tolist()
            print(f"[{it + 1}/{ROUNDS}] D {d:.5f} G {g:.5f}", flush=True)

time.sleep(0.3)
if distributed:
    dist.destroy_process_group()
