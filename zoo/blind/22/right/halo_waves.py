"""Denoise long recordings; the time axis is divided among the processes.

Every process works on one stretch of all the recordings.  A convolution needs a few samples from the
neighbouring stretches, which are exchanged before it; the ends of a recording are padded with zeros.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
LENGTH, BATCH, STEPS = 256, 8, 30
rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))


def trade(to_left, to_right):
    """Send one edge to each neighbour; returns what the left and the right neighbour sent."""
    from_left, from_right = to_right.new_zeros(to_right.shape), to_left.new_zeros(to_left.shape)
    ops = []
    if rank > 0:
        ops += [dist.P2POp(dist.isend, to_left.contiguous(), rank - 1),
                dist.P2POp(dist.irecv, from_left, rank - 1)]
    if rank < world - 1:
        ops += [dist.P2POp(dist.isend, to_right.contiguous(), rank + 1),
                dist.P2POp(dist.irecv, from_right, rank + 1)]
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return from_left, from_right


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.width = width
        left, right = trade(x[..., :width], x[..., -width:])
        return torch.cat([left, x, right], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        w = ctx.width
        inner = grad[..., w:-w].clone()
        left, right = trade(grad[..., :w], grad[..., -w:])
        inner[..., :w] += left
        inner[..., -w:] += right
        return inner, None


class WideConv(nn.Module):
    def __init__(self, cin, cout, kernel=5, dilation=1):
        super().__init__()
        self.halo = dilation * (kernel // 2)
        self.conv = nn.Conv1d(cin, cout, kernel, dilation=dilation)

    def forward(self, x):
        return self.conv(Halo.apply(x, self.halo))


class Denoiser(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.first = WideConv(1, channels)
        self.body = nn.ModuleList(WideConv(channels, channels, 3, d) for d in (1, 2, 4))
        self.last = WideConv(channels, 1)

    def forward(self, x):
        h = F.silu(self.first(x))
        for layer in self.body:
            h = h + F.silu(layer(h))
        return x - self.last(h)


def recordings(count, generator):
    t = torch.arange(LENGTH) / LENGTH
    freq = torch.randint(2, 12, (count, 3, 1), generator=generator)
    amp = torch.rand(count, 3, 1, generator=generator)
    clean = (amp * torch.sin(2 * torch.pi * freq * t)).sum(1, keepdim=True)
    noisy = clean + 0.3 * torch.randn(count, 1, LENGTH, generator=generator)
    per = LENGTH // world
    here = slice(rank * per, (rank + 1) * per)
    return noisy[..., here], clean[..., here]


def add_up(tensors):
    if world == 1:
        return
    flat = torch._utils._flatten_dense_tensors(tensors)
    dist.all_reduce(flat)
    for t, new in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
        t.copy_(new)


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(51)
    model = Denoiser()
    opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
    source = torch.Generator().manual_seed(52)
    for step in range(STEPS):
        noisy, clean = recordings(BATCH, source)
        loss = (model(noisy) - clean).square().sum() / (BATCH * LENGTH)
        opt.zero_grad()
        loss.backward()
        value = loss.detach().clone()
        add_up([p.grad for p in model.parameters()] + [value])
        opt.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} mse {value:.6f}")
    noisy, clean = recordings(32, torch.Generator().manual_seed(53))
    with torch.no_grad():
        sums = torch.stack([(model(noisy) - clean).square().sum(), (noisy - clean).square().sum()])
    add_up([sums])
    if rank == 0:
        print(f"noise removed {10 * torch.log10(sums[1] / sums[0]):.4f} dB")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
