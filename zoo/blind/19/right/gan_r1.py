"""Non-saturating GAN with lazy R1 (second derivatives) and an averaged generator, gradients reduced by hand."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

LATENT, BATCH, STEPS, R1_EVERY, R1_GAMMA, HALF_LIFE = 6, 64, 80, 4, 1.0, 500


def mlp(sizes, normed=False):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        lin = nn.Linear(a, b)
        layers += [spectral_norm(lin) if normed and b > 1 else lin, nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class Group:
    def __init__(self):
        self.active = "RANK" in os.environ
        if self.active:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.active else 0
        self.size = dist.get_world_size() if self.active else 1

    def mine(self, rows):
        per = len(rows) // self.size
        return rows[self.rank * per:(self.rank + 1) * per]

    def average(self, tensors):
        if not self.active:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        flat.div_(self.size)
        offset = 0
        for t in tensors:
            t.copy_(flat[offset:offset + t.numel()].view_as(t))
            offset += t.numel()

    def finish(self):
        if self.active:
            dist.destroy_process_group()


def real_batch(n, g):
    k = torch.randint(0, 8, (n,), generator=g)
    angle = k * (torch.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.08 * torch.randn(n, 2, generator=g)


def step_on(opt, loss, params, group):
    grads = torch.autograd.grad(loss, params)
    group.average(grads)
    for p, gr in zip(params, grads):
        p.grad = gr
    opt.step()


def r1_penalty(disc, real):
    real = real.detach().requires_grad_(True)
    grad, = torch.autograd.grad(disc(real).sum(), real, create_graph=True)
    return grad.square().sum(1).mean()


@torch.no_grad()
def coverage(gen, z, group):
    """Share of samples near a mode, number of modes hit, and mean distance, over all ranks' samples."""
    out = gen(z[group.rank::group.size])
    angle = torch.arange(8) * (torch.pi / 4)
    centres = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    d, near = torch.cdist(out, centres).min(1)
    stats = torch.cat([torch.bincount(near[d < 0.4], minlength=8).double(), d.sum()[None]])
    if group.active:
        dist.all_reduce(stats)
    return stats[:8].sum().item() / len(z), int((stats[:8] > 0).sum()), stats[8].item() / len(z)


def main():
    torch.set_default_dtype(torch.float64)
    group = Group()
    torch.manual_seed(42)
    gen, disc = mlp([LATENT, 48, 48, 2]), mlp([2, 48, 48, 1], normed=True)
    average = copy.deepcopy(gen).requires_grad_(False)
    g_params, d_params = list(gen.parameters()), list(disc.parameters())
    g_opt = torch.optim.Adam(g_params, lr=2e-3, betas=(0.0, 0.99))
    ratio = R1_EVERY / (R1_EVERY + 1)
    d_opt = torch.optim.Adam(d_params, lr=2e-3 * ratio, betas=(0.0, 0.99 ** ratio))

    noise = torch.Generator().manual_seed(1)  # the global batch of noise; each rank keeps its rows
    data = torch.Generator().manual_seed(2)
    fixed = torch.randn(301, LATENT, generator=torch.Generator().manual_seed(3))
    ema_beta = 0.5 ** (BATCH / HALF_LIFE)

    for step in range(STEPS):
        real = group.mine(real_batch(BATCH, data))
        z = group.mine(torch.randn(BATCH, LATENT, generator=noise))
        fake = gen(z).detach()
        d_loss = F.softplus(disc(fake)).mean() + F.softplus(-disc(real)).mean()
        step_on(d_opt, d_loss, d_params, group)
        if step % R1_EVERY == 0:
            penalty = r1_penalty(disc, real) * (R1_GAMMA / 2 * R1_EVERY)
            # the output bias does not enter the penalty
            grads = torch.autograd.grad(penalty, d_params, allow_unused=True)
            grads = [torch.zeros_like(p) if gr is None else gr for p, gr in zip(d_params, grads)]
            group.average(grads)
            for p, gr in zip(d_params, grads):
                p.grad = gr
            d_opt.step()

        z = group.mine(torch.randn(BATCH, LATENT, generator=noise))
        g_loss = F.softplus(-disc(gen(z))).mean()
        step_on(g_opt, g_loss, g_params, group)
        with torch.no_grad():
            for a, p in zip(average.parameters(), g_params):
                a.lerp_(p, 1 - ema_beta)

        if (step + 1) % 20 == 0:
            losses = torch.stack([d_loss.detach(), g_loss.detach()])
            group.average([losses])
            share, modes, distance = coverage(average, fixed, group)
            if group.rank == 0:
                print(f"step {step + 1} D {losses[0]:.10f} G {losses[1]:.10f} near {share:.6f} modes {modes} distance {distance:.10f}")
    group.finish()


if __name__ == "__main__":
    main()
