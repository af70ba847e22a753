"""Generative adversarial training on a ring of Gaussians."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

MODES, LATENT = 8, 8
BATCH = 96
STEPS = 60


def ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.randint(0, MODES, (n,), generator=g) / MODES
    centre = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return centre + 0.1 * torch.randn(n, 2, generator=g)


def mlp(cin, cout, width=64, last_bias=True):
    return nn.Sequential(
        nn.Linear(cin, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, cout, bias=last_bias),
    )


@torch.no_grad()
def average_into(target, source, decay):
    for t, s in zip(target.parameters(), source.parameters()):
        t.lerp_(s, 1 - decay)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(110)
    torch.cuda.manual_seed_all(110)

    g_net, d_net = mlp(LATENT, 2).to(device), mlp(2, 1, last_bias=False).to(device)
    average = mlp(LATENT, 2).to(device).requires_grad_(False)
    if world > 1:
        generator = DDP(g_net, device_ids=[device.index])
        critic = DDP(d_net, device_ids=[device.index])
    else:
        generator, critic = g_net, d_net
    average.load_state_dict(g_net.state_dict())
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True)
    d_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99), fused=True)

    data = ring(3840, seed=111).to(device)
    pick = torch.Generator().manual_seed(112)
    latent = torch.Generator(device=device).manual_seed(113)

    def sample_latent():
        return torch.randn(BATCH, LATENT, generator=latent, device=device)[rank::world]

    history = torch.zeros(2, device=device)
    for step in range(STEPS):
        real = data[torch.randint(0, len(data), (BATCH,), generator=pick)[rank::world].to(device)]
        with torch.no_grad():
            fake = g_net(sample_latent())
        score_real, score_fake = critic(torch.cat([real, fake])).chunk(2)
        d_loss = F.relu(1 - score_real).mean() + F.relu(1 + score_fake).mean()
        d_opt.zero_grad(set_to_none=True)
        d_loss.backward()
        d_opt.step()

        g_loss = F.softplus(-critic(generator(sample_latent()))).mean()
        g_opt.zero_grad(set_to_none=True)
        g_loss.backward()
        g_opt.step()
        average_into(average, g_net, decay=0.95)

        history += torch.stack([d_loss.detach(), g_loss.detach()])
        if (step + 1) % 20 == 0:
            if world > 1:
                dist.all_reduce(history)
            d_mean, g_mean = (history / (20 * world)).tolist()
            if rank == 0:
                print(f"step {step + 1} critic {d_mean:.4f} generator {g_mean:.4f}")
            history.zero_()

    z = torch.randn(600, LATENT, generator=torch.Generator().manual_seed(114))[rank::world].to(device)
    angle = torch.arange(MODES, device=device) * 2 * math.pi / MODES
    centres = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    with torch.no_grad():
        gap = (average(z).unsqueeze(1) - centres).norm(dim=2).min(dim=1).values.sum()
    if world > 1:
        dist.all_reduce(gap)
    if rank == 0:
        print(f"mean distance to the ring {gap.item() / 600:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
