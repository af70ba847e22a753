import io
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
GROUP = WORLD > 1
BATCH, MICRO, CLIP = 48, 2, 2.0


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Regressor(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.body = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(self.inp(x))).squeeze(1)


class OwnedAdam:
    def __init__(self, named, lr, weight_decay):
        self.named = list(named)
        load, self.owner = [0] * WORLD, {}
        for name, p in sorted(self.named, key=lambda item: (-item[1].numel(), item[0])):
            target = load.index(min(load))
            self.owner[name] = target
            load[target] += p.numel()
        self.mine = [(n, p) for n, p in self.named if self.owner[n] == RANK]
        self.inner = torch.optim.AdamW([{"params": [p], "name": n} for n, p in self.mine], lr=lr, weight_decay=weight_decay)

    def reduce_gradients(self):
        for name, p in self.named:
            if GROUP:
                dist.reduce(p.grad, dst=self.owner[name])
            if self.owner[name] != RANK:
                p.grad = None

    def clip(self, limit):
        square = sum((p.grad.double().square().sum() for _, p in self.mine), torch.zeros((), dtype=torch.float64))
        if GROUP:
            dist.all_reduce(square)
        scale = limit / max(limit, square.sqrt().item())
        for _, p in self.mine:
            p.grad.mul_(scale)
        return square.sqrt().item()

    def step(self):
        self.inner.step()
        for name, p in self.named:
            if GROUP:
                dist.broadcast(p.data, src=self.owner[name])
            p.grad = None

    def set_lr(self, lr):
        for group in self.inner.param_groups:
            group["lr"] = lr

    def full_state(self):
        local = {n: self.inner.state[p] for n, p in self.mine}
        parts = [local]
        if GROUP:
            parts = [None] * WORLD if RANK == 0 else None
            dist.gather_object(local, parts, dst=0)
        return {n: s for part in parts for n, s in part.items()} if RANK == 0 else None

    def load_full_state(self, state):
        for n, p in self.mine:
            self.inner.state[p] = {k: v.clone() for k, v in state[n].items()}


def order(epoch, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(1000 + epoch))


def train_epoch(model, optimizer, x, y, epoch):
    total, batches = torch.zeros((), dtype=torch.float64), order(epoch, len(x)).split(BATCH)
    for rows in batches:
        for part in rows.tensor_split(MICRO):
            mine = part.tensor_split(WORLD)[RANK]
            loss = ((model(x[mine]) - y[mine]) ** 2).sum() / len(rows)
            loss.backward()
            total += loss.detach()
        optimizer.reduce_gradients()
        optimizer.clip(CLIP)
        optimizer.step()
    if GROUP:
        dist.all_reduce(total)
    return total.item() / len(batches)


@torch.no_grad()
def evaluate(model, x, y):
    mine = torch.arange(len(x)).tensor_split(WORLD)[RANK]
    error = ((model(x[mine]) - y[mine]).double() ** 2).sum()
    if GROUP:
        dist.all_reduce(error)
    return (1 - error / ((y - y.mean()).double() ** 2).sum()).item()


def fresh():
    torch.manual_seed(11)
    model = Regressor()
    return model, OwnedAdam(model.named_parameters(), lr=3e-3, weight_decay=1e-3)


def main():
    if GROUP:
        dist.init_process_group("gloo")
    data, target = load_diabetes(return_X_y=True)
    x = torch.tensor(data / data.std(0), dtype=torch.get_default_dtype())
    y = torch.tensor((target - target.mean()) / target.std(), dtype=torch.get_default_dtype())
    train, test = (x[:341], y[:341]), (x[341:], y[341:])
    model, optimizer = fresh()
    for epoch in range(6):
        if epoch == 3:
            state, blob = optimizer.full_state(), io.BytesIO()
            if RANK == 0:
                torch.save({"model": model.state_dict(), "optimizer": state}, blob)
            box = [blob.getvalue()]
            if GROUP:
                dist.broadcast_object_list(box, src=0)
            saved = torch.load(io.BytesIO(box[0]))
            model, optimizer = fresh()
            model.load_state_dict(saved["model"])
            optimizer.load_full_state(saved["optimizer"])
        optimizer.set_lr(3e-3 * 0.8 ** epoch)
        loss, score = train_epoch(model, optimizer, *train, epoch), evaluate(model, *test)
        if RANK == 0:
            print(f"epoch {epoch} loss {loss:.6f} r2 {score:.5f}")
    if GROUP:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
