import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def mlp(width=64):
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


class BackwardOptimizer:
    def __init__(self, model, lr, total, world):
        self.world, self.optimizers, self.schedules, self.norms = world, {}, [], []
        for p in model.parameters():
            if p.requires_grad:
                self.optimizers[p] = torch.optim.SGD([p], lr=lr, momentum=0.9)
                self.schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[p], total))
                p.register_post_accumulate_grad_hook(self.apply)

    @torch.no_grad()
    def apply(self, p):
        if self.world > 1:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        norm = p.grad.norm()
        p.grad *= torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()
        self.norms.append(norm)

    def end_of_step(self):
        for schedule in self.schedules:
            schedule.step()
        seen, self.norms = torch.stack(self.norms).mean().item(), []
        return seen


def batches(n, size, epoch, rank, world):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(31 + epoch))
    for rows in order[: n // size * size].split(size):
        yield rows[rank::world]


@torch.no_grad()
def accuracy(model, x, y, rank, world):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x[rank::world])
    result = torch.stack([F.cross_entropy(logits.float(), y[rank::world], reduction="sum"),
                          (logits.argmax(1) == y[rank::world]).sum().float()])
    if world > 1:
        dist.all_reduce(result)
    return (result / len(y)).tolist()


def pretrain(x, y):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(40):
        rows = torch.randint(0, len(x), (64,))
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    shifted = torch.roll(x.view(-1, 8, 8), 1, dims=2).flatten(1)
    teacher = pretrain(shifted[:900], y[:900])
    base = pretrain(x[:900], y[:900])

    torch.manual_seed(1)
    for i in (0, 2):
        base[i] = LoRALinear(base[i])
    base[4].requires_grad_(True)
    train_x, train_y, test_x, test_y = shifted[900:1412], y[900:1412], shifted[1412:], y[1412:]
    epochs, size = 4, 32
    optimizer = BackwardOptimizer(base, 0.1, epochs * (len(train_x) // size), world)
    before = accuracy(base, test_x, test_y, rank, world)
    if rank == 0:
        print(f"before   loss {before[0]:.4f} accuracy {before[1]:.4f}")
    for epoch in range(epochs):
        total, count, norm = torch.zeros(()), 0, 0.0
        for rows in batches(len(train_x), size, epoch, rank, world):
            with torch.no_grad():
                target = (teacher(train_x[rows]) / 2).softmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = base(train_x[rows])
            soft = F.kl_div((logits.float() / 2).log_softmax(-1), target, reduction="batchmean") * 4
            loss = 0.5 * soft + 0.5 * F.cross_entropy(logits.float(), train_y[rows])
            loss.backward()
            norm += optimizer.end_of_step()
            total += loss.detach()
            count += 1
        if world > 1:
            dist.all_reduce(total)
        after = accuracy(base, test_x, test_y, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / count:.4f} norm {norm / count:.4f} "
                  f"test {after[0]:.4f} accuracy {after[1]:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
