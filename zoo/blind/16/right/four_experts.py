"""Mixture of four experts, dealt over the ranks; router and readout are replicated.

Tokens of all ranks reach every rank; a rank runs its own experts and returns what they say.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn
from torch.nn import functional as F

EXPERTS, WIDTH, BATCH, STEPS, CLASSES = 4, 24, 64, 30, 5


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class SharedMoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.inp = nn.Linear(20, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        every = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        self.out = nn.Linear(WIDTH, CLASSES)
        here = EXPERTS // world
        self.first = rank * here
        self.experts = nn.ModuleList(every[self.first:self.first + here])

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        probs = self.router(h).softmax(-1)
        gate, choice = Collect.apply(probs).topk(2, dim=-1)
        tokens = Collect.apply(h)
        answer = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts, self.first):
            row, slot = (choice == e).nonzero(as_tuple=True)
            answer = answer.index_add(0, row, expert(tokens[row]) * gate[row, slot, None])
        load = F.one_hot(choice, EXPERTS).to(h.dtype).mean((0, 1))
        balance = EXPERTS * (load * probs.mean(0)).sum()
        return self.out(h + Return.apply(answer)), balance


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    x, y = make_classification(960, 20, n_informative=12, n_classes=CLASSES, random_state=2)
    x, y = torch.tensor(x), torch.tensor(y)
    torch.manual_seed(14)
    model = SharedMoE(rank, world)
    own = list(model.experts.parameters())
    common = [p for n, p in model.named_parameters() if not n.startswith("experts.")]
    opt = torch.optim.AdamW([{"params": common}, {"params": own, "weight_decay": 0.05}], lr=5e-3)
    order = torch.Generator().manual_seed(40)

    share = BATCH // world
    for step in range(STEPS):
        batch = torch.randint(0, 800, (BATCH,), generator=order)[rank * share:(rank + 1) * share]
        logits, balance = model(x[batch])
        loss = F.cross_entropy(logits, y[batch]) + 0.02 * balance
        opt.zero_grad()
        loss.backward()
        for p in common:
            dist.all_reduce(p.grad)
        for p in common + own:
            p.grad /= world
        square = sum(p.grad.pow(2).sum() for p in own)
        dist.all_reduce(square)
        square += sum(p.grad.pow(2).sum() for p in common)
        scale = (0.8 / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for p in common + own:
            p.grad *= scale
        opt.step()
        if step % 10 == 9:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1}: loss {shown:.10f} gradient {square.sqrt():.10f}")

    with torch.no_grad():
        rows = torch.arange(800, 960).chunk(world)[rank]
        hits = (model(x[rows])[0].argmax(1) == y[rows]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits.item() / 160:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
