"""Digits MLP, hidden matrices with Muon, everything else with AdamW. Model is sharded with fully_shard."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def zeropower(G, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.float()
    transposed = X.size(0) > X.size(1)
    if transposed:
        X = X.T
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.T if transposed else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

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
                buf.mul_(group["momentum"]).add_(p.grad)
                direction = p.grad.add(buf, alpha=group["momentum"])
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                update = distribute_tensor(zeropower(direction.full_tensor()), p.device_mesh, p.placements)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)


class Net(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for lin, norm in zip(self.hidden, self.norms):
            x = x + F.gelu(lin(norm(x)))
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)[:768]
    y = torch.tensor(digits.target)[:768]
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=7)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler, drop_last=True)

    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    for lin in model.hidden:
        fully_shard(lin, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [lin.weight for lin in model.hidden]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizers = [Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.AdamW(rest, lr=2e-3)]

    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            for opt in optimizers:
                opt.step()
                opt.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / world:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
