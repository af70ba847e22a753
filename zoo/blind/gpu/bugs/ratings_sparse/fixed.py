"""Rating prediction with sparse embedding tables and a dense scoring network."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS, DIM = 300, 200, 16
BATCH = 192
STEPS = 60


def ratings(n, seed):
    g = torch.Generator().manual_seed(60)
    user_taste = torch.randn(USERS, 4, generator=g)
    item_style = torch.randn(ITEMS, 4, generator=g)
    g.manual_seed(seed)
    user = (USERS * torch.rand(n, generator=g) ** 2).long()
    item = (ITEMS * torch.rand(n, generator=g) ** 3).long()
    score = (user_taste[user] * item_style[item]).sum(dim=1).tanh()
    return user, item, score + 0.1 * torch.randn(n, generator=g)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, sparse=True)
        self.items = nn.Embedding(ITEMS, DIM, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return self.mlp(torch.cat([u, i, u * i], dim=1)).squeeze(1)


def merge_rows(grad, world):
    """Average a sparse gradient over the workers, exchanging only the touched rows."""
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values()
    size = torch.tensor([rows.numel()], device=rows.device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    sizes = [int(s) for s in sizes]
    pad = max(sizes) - rows.numel()
    rows, values = F.pad(rows, (0, pad)), F.pad(values, (0, 0, 0, pad))
    all_rows = [torch.empty_like(rows) for _ in range(world)]
    all_values = [torch.empty_like(values) for _ in range(world)]
    dist.all_gather(all_rows, rows)
    dist.all_gather(all_values, values)
    table = torch.zeros(grad.shape, device=values.device)
    for r, v, n in zip(all_rows, all_values, sizes):
        table.index_add_(0, r[:n], v[:n])
    touched = torch.cat([r[:n] for r, n in zip(all_rows, sizes)]).unique()
    return torch.sparse_coo_tensor(touched.unsqueeze(0), table[touched] / world, grad.shape).coalesce()


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.manual_seed(61)

    model = Scorer().to(device)
    if world > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)
    tables = [model.users.weight, model.items.weight]
    dense = list(model.mlp.parameters())
    sparse_optimizer = torch.optim.SparseAdam(tables, lr=0.02)
    dense_optimizer = torch.optim.AdamW(dense, lr=3e-3, fused=True)

    user, item, score = (t.to(device) for t in ratings(6000, seed=62))
    pick = torch.Generator().manual_seed(63)
    running = torch.zeros((), device=device)
    for step in range(STEPS):
        idx = torch.randint(0, len(user), (BATCH,), generator=pick)[rank::world].to(device)
        loss = F.mse_loss(model(user[idx], item[idx]), score[idx])
        sparse_optimizer.zero_grad(set_to_none=True)
        dense_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if world > 1:
            for p in tables:
                p.grad = merge_rows(p.grad, world)
            for p in dense:
                dist.all_reduce(p.grad)
                p.grad.div_(world)
        sparse_optimizer.step()
        dense_optimizer.step()
        running += loss.detach()
        if (step + 1) % 20 == 0:
            if world > 1:
                dist.all_reduce(running)
            if rank == 0:
                print(f"step {step + 1} mse {running.item() / 20 / world:.4f}")
            running.zero_()

    user, item, score = (t[rank::world].to(device) for t in ratings(1200, seed=64))
    with torch.no_grad():
        error = (model(user, item) - score).abs().sum()
    if world > 1:
        dist.all_reduce(error)
    if rank == 0:
        print(f"test mae {error.item() / 1200:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
