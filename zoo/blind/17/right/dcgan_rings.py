import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=64, help="global batch size")
parser.add_argument("--nz", type=int, default=6, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=32)
parser.add_argument("--ndf", type=int, default=32)
parser.add_argument("--niter", type=int, default=3, help="number of epochs")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manualSeed", type=int, default=999)
opt = parser.parse_args()

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad


class CrossRankBatchNorm(nn.Module):
    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x):
        if self.training:
            n = x.size(0) * world
            mean = SumOverRanks.apply(x.sum(0)) / n
            var = SumOverRanks.apply(((x - mean) ** 2).sum(0)) / n
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.15)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def wrap(module):
    return DistributedDataParallel(module) if world > 1 else module


torch.manual_seed(opt.manualSeed)
netG = nn.Sequential(
    nn.Linear(opt.nz, opt.ngf, bias=False), CrossRankBatchNorm(opt.ngf), nn.ReLU(True),
    nn.Linear(opt.ngf, opt.ngf, bias=False), CrossRankBatchNorm(opt.ngf), nn.ReLU(True),
    nn.Linear(opt.ngf, 2),
)
netD = nn.Sequential(
    nn.Linear(2, opt.ndf), nn.LeakyReLU(0.2),
    nn.Linear(opt.ndf, opt.ndf, bias=False), CrossRankBatchNorm(opt.ndf), nn.LeakyReLU(0.2),
    nn.Linear(opt.ndf, 1), nn.Flatten(0),
)
netG.apply(weights_init)
netD.apply(weights_init)
netG, netD = wrap(netG), wrap(netD)

angle = torch.rand(768) * 2 * math.pi
radius = torch.where(torch.arange(768) % 3 == 0, 0.5, 1.5) + 0.05 * torch.randn(768)
dataset = TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))
sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=opt.manualSeed)
dataloader = DataLoader(dataset, batch_size=opt.batchSize // world, sampler=sampler, drop_last=True)

noise_rng = torch.Generator().manual_seed(opt.manualSeed + 1)
fixed_noise = torch.randn(256, opt.nz, generator=noise_rng)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    sampler.set_epoch(epoch)
    totals = torch.zeros(3)
    for (real,) in dataloader:
        netD.zero_grad()
        label = torch.ones(real.size(0))
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(opt.batchSize, opt.nz, generator=noise_rng)[rank::world]
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros_like(label))
        errD_fake.backward()
        optimizerD.step()

        netG.zero_grad()
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        totals += torch.stack([errD_real.detach(), errD_fake.detach(), errG.detach()])
    if world > 1:
        dist.all_reduce(totals)
    totals /= world * len(dataloader)
    netG.eval()
    with torch.no_grad():
        sample = (netG.module if world > 1 else netG)(fixed_noise)
    netG.train()
    if rank == 0:
        print("[%d/%d] D(real) %.4f D(fake) %.4f G %.4f  radius %.4f"
              % (epoch, opt.niter, *totals.tolist(), sample.norm(dim=1).mean()))

if world > 1:
    dist.destroy_process_group()
