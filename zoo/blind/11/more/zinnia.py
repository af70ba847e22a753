"""Tensor parallel regression network with DTensor: the processes hold slices of the weights and read the same batches."""
import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from sklearn.datasets import load_diabetes

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30125")


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w_in = nn.Linear(dim, hidden)
        self.w_out = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w_out(F.gelu(self.w_in(x)))


class ResNet(nn.Module):
    def __init__(self, features, dim=24, hidden=64, depth=3):
        super().__init__()
        self.embed = nn.Linear(features, dim)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.ffns = nn.ModuleList([FeedForward(dim, hidden) for _ in range(depth)])
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.embed(x)
        for norm, ffn in zip(self.norms, self.ffns):
            x = x + ffn(norm(x))
        return self.head(x).squeeze(-1)


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def clip(params, max_norm):
    """the norm over complete gradients, sharded or not"""
    norm = torch.stack([full(p.grad).norm() for p in params]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for p in params:
        p.grad.mul_(scale)
    return norm


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    data = load_diabetes()
    x = torch.tensor(data.data, dtype=torch.float32) * 20
    y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)
    torch.manual_seed(21)  # parallelize_module slices these weights, they must be the same on each process
    model = ResNet(x.shape[1])
    for ffn in model.ffns:
        parallelize_module(ffn, mesh, {"w_in": ColwiseParallel(), "w_out": RowwiseParallel()})
    params = list(model.parameters())
    sharded = [p for p in params if isinstance(p, DTensor)]
    plain = [p for p in params if not isinstance(p, DTensor)]
    opts = [torch.optim.AdamW(g, lr=2e-3, weight_decay=0.05, eps=1e-6, foreach=False) for g in (sharded, plain)]
    if rank == 0:
        print(f"{len(sharded)} distributed and {len(plain)} plain parameters")
    g = torch.Generator().manual_seed(2)
    step = 0
    for epoch in range(7):
        # no sampler and no rank in the indices: data parallel degree is one
        for b in torch.randperm(384, generator=g).split(48):
            loss = F.smooth_l1_loss(model(x[b]), y[b])
            for o in opts:
                o.zero_grad()
            loss.backward()
            norm = clip(params, 1.0)
            for o in opts:
                o.step()
            step += 1
        with torch.no_grad():
            val = F.mse_loss(model(x[384:]), y[384:])
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.5f} norm {norm:.5f} val mse {val:.5f}")
    state = {k: full(v) for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, "tp_model.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
