"""Large-batch digits with layer-wise adaptive rates on a fully sharded network."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def length(t):
    return float(torch.linalg.vector_norm(t).full_tensor())


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                rate = group["lr"]
                if p.ndim > 1:
                    grad = grad + group["weight_decay"] * p
                    rate *= group["trust"] * length(p) / (length(grad) + 1e-9)
                velocity = self.state[p].get("velocity")
                if velocity is None:
                    velocity = self.state[p]["velocity"] = torch.zeros_like(p)
                velocity.mul_(group["momentum"]).add_(grad, alpha=rate)
                p.sub_(velocity)


def warmup_then_cosine(total, warm):
    def factor(step):
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
    return factor


def network():
    torch.manual_seed(12)
    return nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10),
    )


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0)
    y = torch.tensor(digits.target)
    train, held = slice(0, 1536), slice(1536, 1792)

    mesh = init_device_mesh("cpu", (world,))
    net = network()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)

    batch, epochs = 256, 5
    steps = epochs * 1536 // batch
    optimizer = Lars(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(steps, 6))
    for epoch in range(epochs):
        net.train()
        order = torch.randperm(1536, generator=torch.Generator().manual_seed(40 + epoch))
        for rows in order.split(batch):
            rows = rows[rank::world]
            loss = F.cross_entropy(net(x[train][rows]), y[train][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        with torch.no_grad():
            logits, labels = net(x[held][rank::world]), y[held][rank::world]
            result = torch.stack([
                F.cross_entropy(logits, labels, reduction="sum"),
                (logits.argmax(1) == labels).sum().double(),
            ])
        dist.all_reduce(result)
        if rank == 0:
            print(f"epoch {epoch} held-out loss {result[0].item() / 256:.8f} accuracy {result[1].item() / 256:.4f}")
    norms = [p.detach().full_tensor().norm().item() for p in net.parameters() if p.ndim > 1]
    if rank == 0:
        print("layer norms", " ".join(f"{v:.10f}" for v in norms))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
