# WGAN-GP on two dimensional points (8 gaussians)
import os
import time
import numpy as np
import torch
import torch.nn as nn
import torch.autograd as autograd
import torch.distributed as dist

DIM = 64
LAMBDA = .1
CRITIC_ITERS = 3
BATCH_SIZE = 128
ITERS = 36

os.environ.setdefault('RANK', '0'), os.environ.setdefault('WORLD_SIZE', '1')
os.environ.setdefault('MASTER_ADDR', '127.0.0.1'), os.environ.setdefault('MASTER_PORT', '30108')
dist.init_process_group('gloo')
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1 + RANK)


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(True), nn.Linear(DIM, DIM), nn.ReLU(True), nn.Linear(DIM, 2))

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.main = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(True), nn.Linear(DIM, DIM), nn.ReLU(True), nn.Linear(DIM, 1))

    def forward(self, inputs):
        return self.main(inputs).view(-1)


def sync_weights(net):
    for t in net.state_dict().values():
        dist.broadcast(t, 0)


def sync_grads(net):
    works = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
    for w, p in zip(works, net.parameters()):
        w.wait()
        p.grad.div_(WORLD)


class Rng:
    """One stream for the whole job. Each process draws the global batch and keeps its rows."""

    def __init__(self, seed):
        self.r = np.random.RandomState(seed)

    def _mine(self, a):
        n = BATCH_SIZE // WORLD
        return torch.from_numpy(a[RANK * n:(RANK + 1) * n].astype('float32'))

    def real(self):
        angle = self.r.randint(8, size=BATCH_SIZE) * np.pi / 4
        return self._mine(2 * np.stack([np.cos(angle), np.sin(angle)], 1) / 1.414 + .02 * self.r.randn(BATCH_SIZE, 2))

    def noise(self):
        return self._mine(self.r.randn(BATCH_SIZE, 2))

    def alpha(self):
        return self._mine(self.r.rand(BATCH_SIZE, 1))


def calc_gradient_penalty(netD, real_data, fake_data, alpha):
    interpolates = (alpha * real_data + (1 - alpha) * fake_data).requires_grad_(True)
    disc_interpolates = netD(interpolates)
    gradients = autograd.grad(outputs=disc_interpolates, inputs=interpolates, grad_outputs=torch.ones_like(disc_interpolates),
                              create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


netG, netD = Generator(), Discriminator()
sync_weights(netG)
sync_weights(netD)
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-6)
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-6)
rng = Rng(0)

for iteration in range(ITERS):
    # (1) Update D network
    for p in netD.parameters():
        p.requires_grad = True  # they are set to False below in netG update
    for _ in range(CRITIC_ITERS if iteration else 6):
        real, z, alpha = rng.real(), rng.noise(), rng.alpha()
        netD.zero_grad()
        with torch.no_grad():
            fake = netG(z)
        D_real, D_fake = netD(real).mean(), netD(fake).mean()
        gradient_penalty = calc_gradient_penalty(netD, real, fake, alpha)
        (D_fake - D_real + gradient_penalty).backward()
        sync_grads(netD)
        optimizerD.step()
    # (2) Update G network
    for p in netD.parameters():
        p.requires_grad = False  # to avoid computation
    netG.zero_grad()
    G_cost = -netD(netG(rng.noise())).mean()
    G_cost.backward()
    sync_grads(netG)
    optimizerG.step()
    if iteration % 9 == 8:
        log = torch.stack([D_real - D_fake, gradient_penalty, G_cost]).detach()
        dist.reduce(log, 0)
        if RANK == 0:
            w, gp, g = (log / WORLD).tolist()
            print('iter %d wasserstein %.4f gp %.4f G %.4f' % (iteration + 1, w, gp, g))
time.sleep(0.3)
dist.destroy_process_group()
