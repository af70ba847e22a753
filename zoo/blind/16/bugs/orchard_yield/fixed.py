"""Fruit yield per tree from leaf sensors: a mixture of four experts, the experts spread over the processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, BATCH, STEPS = 4, 16, 64, 60


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.size(0)
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[RANK * ctx.rows:(RANK + 1) * ctx.rows]


class CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(WORLD)[RANK].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(WORLD)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class ExpertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        per_rank = EXPERTS // WORLD
        self.first = RANK * per_rank
        self.experts = nn.ModuleList(experts[self.first:self.first + per_rank])

    def forward(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        tokens = GatherTokens.apply(x)
        choices = [torch.empty_like(choice) for _ in range(WORLD)]
        dist.all_gather(choices, choice)
        choices = torch.cat(choices)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            picked = (choices == self.first + i).nonzero().squeeze(1)
            out = out.index_add(0, picked, expert(tokens[picked]))
        return x + gate.unsqueeze(1) * CombineTokens.apply(out)


class YieldNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.moe = ExpertLayer()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.moe(torch.tanh(self.embed(x)))).squeeze(1)


def sync_gradients(model):
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad.div_(WORLD)


def orchard(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    plot = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    slope = torch.tensor([[1.0, -1, 0.5, 0], [0, 1, -1, 0.5], [-1, 0, 1, 1], [0.5, 0.5, 0, -1]])
    return x, (x[:, 2:] * slope[plot]).sum(1) + 0.1 * torch.randn(n, generator=g)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(11)
    model = YieldNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    x, y = orchard(1024, 1)
    order = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        batch = torch.randint(0, len(x), (BATCH,), generator=order).chunk(WORLD)[RANK]
        loss = F.mse_loss(model(x[batch]), y[batch])
        opt.zero_grad()
        loss.backward()
        sync_gradients(model)
        opt.step()
        if step % 20 == 19:
            total = loss.detach() / WORLD
            dist.all_reduce(total)
            if RANK == 0:
                print(f"step {step + 1} mse {total:.8f}")
    xt, yt = orchard(256, 2)
    with torch.no_grad():
        part = slice(RANK * 256 // WORLD, (RANK + 1) * 256 // WORLD)
        err = (model(xt[part]) - yt[part]).square().sum()
        size = sum(p.square().sum() for p in model.moe.experts.parameters())
        both = torch.stack([err / 256, size])
        dist.all_reduce(both)
    if RANK == 0:
        print(f"held out mse {both[0]:.8f} experts {both[1]:.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
