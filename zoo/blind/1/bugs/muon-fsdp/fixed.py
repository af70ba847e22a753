import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


def newton_schulz(m, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    flip = x.size(0) > x.size(1)
    if flip:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buf = state["momentum_buffer"]
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = newton_schulz(buf.full_tensor())
                update *= max(1, p.size(0) / p.size(1)) ** 0.5
                p.sub_(distribute_tensor(update, p.device_mesh, p.placements), alpha=group["lr"])


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class MLP(nn.Module):
    def __init__(self, dim=64, depth=2):
        super().__init__()
        self.embed = nn.Linear(64, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def train(global_batch=128, epochs=3):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = MLP()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)

    hidden = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if not ("blocks" in n and p.ndim == 2)]
    muon = Muon(hidden, lr=0.02)
    adam = torch.optim.AdamW(rest, lr=3e-3, foreach=False)

    data = load_digits()
    x = torch.tensor(data.data / 16.0, dtype=torch.float32)[:1536]
    y = torch.tensor(data.target)[:1536]
    per = global_batch // world
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(x), global_batch):
            idx = order[start + rank * per:start + (rank + 1) * per]
            loss = F.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            muon.step()
            adam.step()
            muon.zero_grad()
            adam.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch}: last loss {total.item() / world:.4f}")
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = train()
    dist.destroy_process_group()
