import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

BATCH, EPOCHS = 128, 2


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class Net(nn.Module):
    def __init__(self, dim=40, hidden=72, depth=2):
        super().__init__()
        self.embed = nn.Linear(64, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def orthogonalise(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = g.size(0) > g.size(1)
    x = g.T if wide else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if wide else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buf = state["momentum"]
                buf.mul_(group["momentum"]).add_(p.grad)
                update = p.grad + group["momentum"] * buf
                full = orthogonalise(update.full_tensor())
                full *= max(1.0, full.size(0) / full.size(1)) ** 0.5
                shard = distribute_tensor(full, p.device_mesh, p.placements)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(shard, alpha=-group["lr"])


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(21)
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=EPOCHS * 11) for o in optimizers]

    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.get_default_dtype())
    y = torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1408], y[:1408], x[1408:], y[1408:]
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        running = torch.zeros(())
        for rows in order.split(BATCH):
            mine = rows.chunk(world)[rank]
            loss = F.cross_entropy(model(train_x[mine]), train_y[mine])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            for optimizer, scheduler in zip(optimizers, schedulers):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            running += loss.detach()
        dist.all_reduce(running)
        with torch.no_grad():
            part = slice(rank, None, world)
            logits = model(test_x[part])
            scores = torch.stack([F.cross_entropy(logits, test_y[part], reduction="sum"),
                                  (logits.argmax(1) == test_y[part]).sum().to(logits.dtype)])
        dist.all_reduce(scores)
        last_norm = full(norm).item()
        if rank == 0:
            test_loss, accuracy = (scores / len(test_x)).tolist()
            print(f"epoch {epoch} train {running.item() / world / 11:.5f} test {test_loss:.5f} "
                  f"accuracy {accuracy:.4f} grad norm {last_norm:.4f}")
    weights = torch.cat([full(p).detach().flatten() for p in model.parameters()])
    if rank == 0:
        print(f"weights {weights.norm().item():.5f} {weights.abs().mean().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
