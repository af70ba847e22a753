"""Regression with parameters kept as replicated DTensors; the gated layer calls a plain-tensor kernel."""
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor


class GatedKernel(torch.autograd.Function):
    """y = gain * swish(x @ w + b), with a hand-written backward pass."""

    @staticmethod
    def forward(ctx, x, w, b, gain):
        z = x @ w + b
        s = torch.sigmoid(z)
        ctx.save_for_backward(x, w, z, s, gain)
        return gain * z * s

    @staticmethod
    def backward(ctx, dy):
        x, w, z, s, gain = ctx.saved_tensors
        dgain = (dy * z * s).sum(0)
        dz = dy * gain * (s + z * s * (1 - s))
        return dz @ w.T, x.T @ dz, dz.sum(0), dgain


class GatedLayer(nn.Module):
    def __init__(self, n_in, n_out, mesh, gen):
        super().__init__()
        full = dict(w=torch.randn(n_in, n_out, generator=gen) / n_in ** 0.5,
                    b=torch.zeros(n_out), gain=torch.ones(n_out))
        for name, t in full.items():
            self.register_parameter(name, nn.Parameter(distribute_tensor(t, mesh, [Replicate()])))

    def forward(self, x):
        w = self.w.to_local(grad_placements=[Partial()])
        b = self.b.to_local(grad_placements=[Partial()])
        gain = self.gain.to_local(grad_placements=[Partial()])
        return GatedKernel.apply(x, w, b, gain)


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        gen = torch.Generator().manual_seed(31)
        self.a = GatedLayer(10, 48, mesh, gen)
        self.b = GatedLayer(48, 24, mesh, gen)
        self.out = nn.Parameter(distribute_tensor(torch.randn(24, 1, generator=gen) / 5, mesh, [Replicate()]))

    def forward(self, x):
        return self.b(self.a(x)) @ self.out.to_local(grad_placements=[Partial()])


def settle(params):
    """Bring the gradients to the placement of their parameters."""
    for p in params:
        if p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def run():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x * 20, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
    net = Net(mesh)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.8)
    batch, steps = 88, 50
    for step in range(steps):
        if step % 5 == 0:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))
        at = (step % 5) * batch
        rows = order[at:at + batch][rank::world]
        loss = ((net(x[rows]) - y[rows]) ** 2).sum() / batch
        opt.zero_grad()
        loss.backward()
        settle(params)
        opt.step()
        if step % 10 == 9:
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            if rank == 0:
                print(f"step {step + 1}: mse {whole.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
