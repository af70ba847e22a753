"""Matrix factorisation of ratings; Adam moments are sharded, training is restarted half-way."""
import glob
import os
import shutil
import tempfile

import torch
import torch.distributed as dist

USERS, ITEMS, RANK = 60, 44, 6
GLOBAL_BATCH, HALF, STEPS = 64, 20, 40


def make_ratings():
    g = torch.Generator().manual_seed(41)
    taste, style = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    user = torch.randint(0, USERS, (1800,), generator=g)
    item = torch.randint(0, ITEMS, (1800,), generator=g)
    score = (taste[user] * style[item]).sum(1) + 0.3 * torch.randn(1800, generator=g)
    return user, item, score


class Factors:
    """User and item factors and biases in one vector."""

    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.flat = 0.3 * torch.randn((USERS + ITEMS) * (RANK + 1), generator=g)
        self.flat.requires_grad_()

    def predict(self, user, item):
        table = self.flat.view(USERS + ITEMS, RANK + 1)
        u, i = table[user], table[USERS + item]
        return (u[:, :-1] * i[:, :-1]).sum(1) + u[:, -1] + i[:, -1]


class ShardedAdam:
    def __init__(self, flat, rank, world, lr=0.03, betas=(0.9, 0.99)):
        self.flat, self.rank, self.world, self.lr, self.betas = flat, rank, world, lr, betas
        self.m = torch.zeros(len(flat) // world)
        self.v = torch.zeros_like(self.m)
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        grad = self.flat.grad
        if self.world > 1:
            dist.all_reduce(grad)
        grad = grad.chunk(self.world)[self.rank] / self.world
        self.m.lerp_(grad, 1 - self.betas[0])
        self.v.lerp_(grad.square(), 1 - self.betas[1])
        m, v = self.m / (1 - self.betas[0] ** self.t), self.v / (1 - self.betas[1] ** self.t)
        mine = self.flat.chunk(self.world)[self.rank] - self.lr * m / (v.sqrt() + 1e-8)
        if self.world > 1:
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            mine = torch.cat(parts)
        self.flat.copy_(mine)
        self.flat.grad = None


def save(folder, model, optimizer, step):
    if optimizer.rank == 0:
        torch.save({"flat": model.flat.detach(), "step": step}, os.path.join(folder, "model.pt"))
    state = {"m": optimizer.m, "v": optimizer.v, "t": optimizer.t}
    torch.save(state, os.path.join(folder, f"adam-{optimizer.rank:03d}.pt"))


def load(folder, model, optimizer):
    saved = torch.load(os.path.join(folder, "model.pt"))
    with torch.no_grad():
        model.flat.copy_(saved["flat"])
    files = sorted(glob.glob(os.path.join(folder, "adam-*.pt")))
    state = torch.load(files[optimizer.rank])
    optimizer.m, optimizer.v, optimizer.t = state["m"], state["v"], state["t"]
    return saved["step"]


def train(model, optimizer, data, first, last, rank, world):
    user, item, score = data
    for step in range(first, last):
        ids = torch.randint(0, len(score), (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
        mine = ids[rank::world]
        loss = (model.predict(user[mine], item[mine]) - score[mine]).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            shown = loss.detach().clone()
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.8f}")


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    box = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.init_process_group("gloo")
        dist.broadcast_object_list(box)
    data = make_ratings()
    model = Factors()
    optimizer = ShardedAdam(model.flat, rank, world)
    train(model, optimizer, data, 0, HALF, rank, world)
    save(box[0], model, optimizer, HALF)
    if world > 1:
        dist.barrier()

    model = Factors()
    optimizer = ShardedAdam(model.flat, rank, world)
    first = load(box[0], model, optimizer)
    train(model, optimizer, data, first, STEPS, rank, world)

    if rank == 0:
        with torch.no_grad():
            error = (model.predict(data[0], data[1]) - data[2]).square().mean().sqrt()
        print(f"rmse {error.item():.8f} norm {model.flat.detach().norm().item():.8f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(box[0])


if __name__ == "__main__":
    main()
