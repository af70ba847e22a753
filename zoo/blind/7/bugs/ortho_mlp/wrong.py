import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29551")):
    os.environ.setdefault(k, v)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    for _ in range(steps):
        m = x @ x.T
        x = a * x + (b * m + c * m @ m) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros_like(p)
                st["m"].mul_(group["momentum"]).add_(p.grad)
                u = p.grad + group["momentum"] * st["m"]
                if isinstance(u, DTensor):
                    p.to_local().add_(newton_schulz(u.to_local()), alpha=-group["lr"])
                else:
                    p.add_(newton_schulz(u), alpha=-group["lr"])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(64, 48), Residual(48), Residual(48), nn.Linear(48, 10))
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n[0] in "12"]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and n[0] in "12")]
    opts = [Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=2e-3)]

    d = load_digits()
    X = torch.tensor(d.data, dtype=torch.float32) / 16
    Y = torch.tensor(d.target)
    gen = torch.Generator().manual_seed(0)
    for it in range(25):
        idx = torch.randint(0, 1500, (96,), generator=gen).chunk(WORLD)[RANK]
        loss = F.cross_entropy(model(X[idx]), Y[idx])
        loss.backward()
        for o in opts:
            o.step()
            o.zero_grad()
        if it % 5 == 4:
            l = loss.detach().clone()
            dist.all_reduce(l)
            if RANK == 0:
                print(f"{it + 1:3d} {l.item() / WORLD:.5f}")
    with torch.no_grad():
        right = (model(X[1500:]).argmax(1) == Y[1500:]).float().mean()
    if RANK == 0:
        print(f"test {right:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
