"""Mixture of experts regression with the experts spread over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

N_EXPERTS = 8
DIM, HIDDEN = 6, 24
GLOBAL_BATCH = 128
STEPS = 60


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.send, ctx.recv = send, recv
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.recv)
        return out, None, None


class MoELayer(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.world = world
        self.n_local = N_EXPERTS // world
        self.gate = nn.Linear(DIM, N_EXPERTS)
        experts = [nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM)) for _ in range(N_EXPERTS)]
        first = rank * self.n_local
        self.experts = nn.ModuleDict({str(first + i): experts[first + i] for i in range(self.n_local)})

    def forward(self, x):
        weight, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=N_EXPERTS)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        send = counts.view(self.world, -1).sum(1).tolist()
        recv = incoming.view(self.world, -1).sum(1).tolist()

        tokens = Exchange.apply(x[order], send, recv)
        owner = torch.arange(self.n_local).repeat(self.world).repeat_interleave(incoming)
        out = torch.zeros_like(tokens)
        for i, layer in enumerate(self.experts.values()):
            rows = (owner == i).nonzero().squeeze(1)
            out = out.index_copy(0, rows, layer(tokens[rows]))
        back = Exchange.apply(out, recv, send)
        return torch.zeros_like(back).index_copy(0, order, back) * weight.unsqueeze(1)


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.moe = MoELayer(rank, world)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        return self.head(h + self.moe(h)).squeeze(-1)


def make_data(n):
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(n, DIM, generator=gen)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    w = torch.randn(4, DIM, generator=gen)
    return x, torch.sin((x * w[region]).sum(-1)) + 0.05 * torch.randn(n, generator=gen)


def average_gradients(model, world):
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= world


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_data(2048 + 512)
    x_train, y_train, x_test, y_test = x[:2048], y[:2048], x[2048:], y[2048:]
    torch.manual_seed(3)
    model = Net(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for step in range(STEPS):
        gen = torch.Generator().manual_seed(step)
        batch = torch.randint(2048, (GLOBAL_BATCH,), generator=gen)[rank::world]
        loss = F.mse_loss(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        average_gradients(model, world)
        optimizer.step()

    with torch.no_grad():
        error = (model(x_test[rank::world]) - y_test[rank::world]).pow(2).sum()
    dist.all_reduce(error)
    if rank == 0:
        print(f"test mse {error.item() / len(y_test):.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
