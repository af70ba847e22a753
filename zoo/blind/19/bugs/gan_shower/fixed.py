"""Small GAN for calorimeter shower profiles; spectrally normalised critic, hand-written synchronisation."""
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

LAYERS, NOISE = 16, 6
GLOBAL_BATCH, STEPS = 32, 40


def make_showers(n=640):
    g = torch.Generator().manual_seed(13)
    depth = torch.arange(1, LAYERS + 1, dtype=torch.float64)
    shape = 2 + 3 * torch.rand(n, 1, generator=g, dtype=torch.float64)
    rate = 0.4 + 0.5 * torch.rand(n, 1, generator=g, dtype=torch.float64)
    profile = depth.pow(shape - 1) * torch.exp(-rate * depth)
    return profile / profile.sum(1, keepdim=True) * 4


def build():
    generator = nn.Sequential(
        nn.Linear(NOISE, 32), nn.LeakyReLU(0.2), nn.Linear(32, LAYERS), nn.Softplus()
    ).double()
    critic = nn.Sequential(
        spectral_norm(nn.Linear(LAYERS, 32)), nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(32, 32)), nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(32, 1)),
    ).double()
    return generator, critic


def same_start(module, world):
    if world == 1:
        return
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        dist.broadcast(tensor.data, src=0)


def average_grads(module, world):
    if world == 1:
        return
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    showers = make_showers()
    torch.manual_seed(40 + rank)
    generator, critic = build()
    same_start(generator, world)
    same_start(critic, world)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9))

    for step in range(STEPS):
        shared = torch.Generator().manual_seed(7000 + step)
        ids = torch.randint(0, len(showers), (GLOBAL_BATCH,), generator=shared)
        noise = torch.randn(2, GLOBAL_BATCH, NOISE, generator=shared, dtype=torch.float64)
        real = showers[ids[rank::world]]
        noise = noise[:, rank::world]

        with torch.no_grad():
            fake = generator(noise[0])
        scores = critic(torch.cat([real, fake]))
        on_real, on_fake = scores.chunk(2)
        loss_d = F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean()
        opt_d.zero_grad()
        loss_d.backward()
        average_grads(critic, world)
        opt_d.step()

        loss_g = -critic(generator(noise[1])).mean()
        opt_g.zero_grad()
        loss_g.backward()
        average_grads(generator, world)
        opt_g.step()

        if step % 10 == 9:
            losses = torch.stack([loss_d.detach(), loss_g.detach()])
            if world > 1:
                dist.all_reduce(losses)
            d, g = (losses / world).tolist()
            if rank == 0:
                print(f"step {step + 1} critic {d:.8f} generator {g:.8f}")

    if rank == 0:
        with torch.no_grad():
            z = torch.randn(200, NOISE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            gap = (generator(z).mean(0) - showers.mean(0)).abs().max()
        print(f"profile gap {gap.item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
