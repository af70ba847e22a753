"""Mixture of experts on digits. Experts are spread over the ranks, the rest is data parallel."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
N_EXPERTS, TOP_K, DIM = 4, 2, 32


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.n = x.size(0)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g[dist.get_rank() * ctx.n:(dist.get_rank() + 1) * ctx.n]


class ReturnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, g):
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        rank, per = dist.get_rank(), N_EXPERTS // dist.get_world_size()
        self.first = rank * per
        self.router = nn.Linear(DIM, N_EXPERTS)
        everyone = [nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)) for _ in range(N_EXPERTS)]
        self.experts = nn.ModuleList(everyone[self.first:self.first + per])

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        top = probs.topk(TOP_K, dim=-1)
        weight = torch.zeros_like(probs).scatter(1, top.indices, top.values)
        tokens, weight = GatherTokens.apply(x), GatherTokens.apply(weight)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            w = weight[:, self.first + i]
            pick = w.nonzero().squeeze(1)
            out = out.index_add(0, pick, expert(tokens[pick]) * w[pick, None])
        return ReturnTokens.apply(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(64, DIM)
        self.moe = MoE()
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, 10)

    def forward(self, x):
        h = self.inp(x).relu()
        return self.out(self.norm(h + self.moe(h)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = Net()
    local = [n for n, _ in net.named_parameters() if ".experts." in n]
    DDP._set_params_and_buffers_to_ignore_for_model(net, local)
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    gen = torch.Generator().manual_seed(3)
    for step in range(30):
        idx = torch.randint(0, 1500, (64,), generator=gen)[rank::world]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
