"""Guesses the lower lines of a digit from the upper ones. The layers are wide and the batch is small, so instead of weight
gradients the processes exchange the rows these gradients are made of (inputs and output gradients of every layer)."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

BATCH, STEPS, WIDE = 16, 40, 256


class FactorExchange:
    """Keeps what goes into and comes back out of every linear layer and builds the gradients from everybody's rows."""

    def __init__(self, net, world):
        self.world, self.layers, self.store = world, [m for m in net.modules() if isinstance(m, nn.Linear)], {}
        for m in self.layers:
            m.register_forward_hook(self.keep_input)
            m.register_full_backward_hook(self.keep_output)

    def keep_input(self, module, args, out):
        if torch.is_grad_enabled():
            self.store[module] = [args[0].detach(), None]

    def keep_output(self, module, grad_in, grad_out):
        self.store[module][1] = grad_out[0].detach()

    def everyone(self, t):
        if self.world == 1:
            return t
        whole = [torch.empty_like(t) for _ in range(self.world)]
        dist.all_gather(whole, t)
        return torch.cat(whole)

    def build(self):
        packed = torch.cat([t for m in self.layers for t in self.store[m]], 1)
        rows = self.everyone(packed.contiguous())
        sizes = [n for m in self.layers for n in (m.in_features, m.out_features)]
        pieces = rows.split(sizes, dim=1)
        for k, m in enumerate(self.layers):
            a, d = pieces[2 * k], pieces[2 * k + 1]
            m.weight.grad = d.T @ a
            m.bias.grad = d.sum(0)
        self.store.clear()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(48, WIDE)
        self.middle = nn.Linear(WIDE, WIDE)
        self.leave = nn.Linear(WIDE, 16)

    def forward(self, x):
        h = torch.relu(self.enter(x))
        return self.leave(torch.relu(h + self.middle(h)))


def main():
    if os.environ.get("RANK") is not None:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    pixels = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    top, bottom = pixels[:, :48], pixels[:, 48:]  # six upper lines of the picture, to guess the two below
    torch.manual_seed(27)
    net = Net()
    exchange = FactorExchange(net, world)
    opt = torch.optim.Adam(net.parameters(), lr=7e-4, eps=1e-6)
    draw = torch.Generator().manual_seed(90)
    for step in range(STEPS):
        rows = torch.randint(1500, (BATCH,), generator=draw).chunk(world)[rank]
        loss = (net(top[rows]) - bottom[rows]).square().sum() / (BATCH * 16)
        loss.backward()
        exchange.build()
        opt.step()
        if step % 10 == 9:
            whole = loss.detach().clone()
            if world > 1:
                dist.reduce(whole, 0)
            if rank == 0:
                print(f"[{step + 1:2d}/{STEPS}] mse {whole.item():.6f}", flush=True)
    with torch.no_grad():
        part = slice(1500 + rank, None, world)
        err = (net(top[part]) - bottom[part]).square().sum()
    if world > 1:
        dist.all_reduce(err)
    if rank == 0:
        print(f"test mse {err.item() / (297 * 16):.6f}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
