"""Super-resolution (x2) of random textures with a recursive net, gradients over a ring of our own.

One block is applied again and again, every depth gives a picture, and the pictures are mixed (DRCN).
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DEPTH = 4
BATCH = 16
STEPS = 20


class Recursive(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Conv2d(1, width, 3, padding=1)
        self.block = nn.Conv2d(width, width, 3, padding=1)
        self.to_pixels = nn.Conv2d(width, 1, 3, padding=1)
        self.mix = nn.Parameter(torch.zeros(DEPTH))

    def forward(self, small):
        up = F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
        h = F.leaky_relu(self.embed(up), 0.1)
        weights = self.mix.softmax(0)
        out = 0.0
        for d in range(DEPTH):
            h = h + F.leaky_relu(self.block(h), 0.1)
            out = out + weights[d] * (up + self.to_pixels(h))
        return out


def ring_hook(state, bucket):
    """Ring all-reduce: world - 1 rounds of adding up, world - 1 rounds of handing on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = bucket.buffer()
    state["bytes"] += flat.numel() * flat.element_size()
    done = torch.futures.Future()
    if world > 1:
        size = -(-flat.numel() // world)
        padded = F.pad(flat, (0, size * world - flat.numel()))
        chunks = list(padded.view(world, size).unbind(0))
        inbox = torch.empty(size)
        right, left = (rank + 1) % world, (rank - 1) % world
        for hop in range(2 * (world - 1)):
            work = dist.isend(chunks[(rank - hop) % world].clone(), right)
            dist.recv(inbox, left)
            target = chunks[(rank - hop - 1) % world]
            if hop < world - 1:
                target.add_(inbox)
            else:
                target.copy_(inbox)
            work.wait()
        flat.copy_(padded[:flat.numel()])
    done.set_result(flat.div_(world))
    return done


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, 1, 32, 32, generator=g)
    angle = torch.rand(n, 1, 1, 1, generator=g) * 3.14
    grid = torch.linspace(-3, 3, 32)
    wave = torch.sin(6 * (grid[:, None] * angle.cos() + grid[None, :] * angle.sin()))
    return F.avg_pool2d(F.pad(noise, (1, 1, 1, 1), mode="circular"), 3, stride=1) + 0.7 * wave


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    big = textures(160, seed=1)
    small = F.avg_pool2d(big, 2)
    test_big = textures(30, seed=2)
    test_small = F.avg_pool2d(test_big, 2)

    model = DDP(Recursive(), static_graph=True, bucket_cap_mb=0.004)
    sent = {"bytes": 0}
    model.register_comm_hook(sent, ring_hook)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    order = torch.Generator().manual_seed(3)
    per = BATCH // world
    for step in range(STEPS):
        if step % (len(big) // BATCH) == 0:
            perm = torch.randperm(len(big), generator=order)
            at = 0
        mine = perm[at + rank * per:at + (rank + 1) * per]
        at += BATCH
        loss = F.smooth_l1_loss(model(small[mine]), big[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 4:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.5f}")

    with torch.no_grad():
        err = torch.zeros(2, dtype=torch.float64)
        for i in range(rank, len(test_big), world):
            out = model.module(test_small[i:i + 1])
            err += torch.tensor([(out - test_big[i:i + 1]).square().mean().item(), 1.0])
    dist.all_reduce(err)
    if rank == 0:
        print(f"test psnr {-10 * torch.log10(err[0] / err[1]).item():.3f} over {int(err[1])} pictures")
        print(f"{sent['bytes'] // STEPS} bytes of gradients a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
