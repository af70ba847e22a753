# Implicit feedback recommender (BPR) with sparse embedding gradients
import os
import time
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30130")

USERS, ITEMS, DIM, BATCH, EPOCHS = 300, 200, 16, 256, 4


def interactions(seed=0, per_user=16):
    """users and items on a latent map; the last interaction of each user is held out"""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(USERS, 4)) @ rng.normal(size=(4, ITEMS)) + 0.5 * rng.gumbel(size=(USERS, ITEMS))
    liked = np.argsort(-score, 1)[:, :per_user]
    liked = rng.permuted(liked, axis=1)
    train = np.stack([np.repeat(np.arange(USERS), per_user - 1), liked[:, :-1].ravel()], 1)
    return train, liked[:, -1]


class BPR(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM, sparse=True)
        self.item = nn.Embedding(ITEMS, DIM, sparse=True)
        self.bias = nn.Embedding(ITEMS, 1, sparse=True)
        self.mix = nn.Linear(DIM, DIM, bias=False)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)
        nn.init.eye_(self.mix.weight)

    def score(self, u, i):
        return (self.mix(self.user(u)) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)


def reduce_sparse(grad, world):
    """Row ids and rows of all processes one behind the other, coalesce() adds what belongs together.
    The numbers of rows differ, so they are padded to the longest and cut again."""
    grad = grad.coalesce()
    n = torch.tensor([grad._nnz()])
    sizes = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    longest = int(max(sizes))
    idx = torch.zeros(longest, dtype=torch.long)
    val = torch.zeros(longest, grad.shape[1])
    idx[:n], val[:n] = grad.indices()[0], grad.values()
    all_idx, all_val = [torch.empty_like(idx) for _ in range(world)], [torch.empty_like(val) for _ in range(world)]
    dist.all_gather(all_idx, idx)
    dist.all_gather(all_val, val)
    idx = torch.cat([a[:int(s)] for a, s in zip(all_idx, sizes)])
    val = torch.cat([a[:int(s)] for a, s in zip(all_val, sizes)]) / world
    return torch.sparse_coo_tensor(idx[None], val, grad.shape).coalesce()


@torch.no_grad()
def hit_rate(model, held_out, seen, k=10):
    rank, world = dist.get_rank(), dist.get_world_size()
    u = torch.arange(rank, USERS, world)
    s = model.mix(model.user(u)) @ model.item.weight.t() + model.bias.weight.t()
    s[seen[u]] = -1e9
    hits = (s.topk(k, 1).indices == held_out[u, None]).any(1).sum()
    dist.all_reduce(hits)
    return hits.item() / USERS


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, held_out = interactions()
    held_out = torch.from_numpy(held_out)
    seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    seen[train[:, 0], train[:, 1]] = True
    torch.manual_seed(0)
    model = BPR()
    tables = [model.user.weight, model.item.weight, model.bias.weight]
    opt_sparse = torch.optim.SparseAdam(tables, lr=0.02, eps=1e-6)
    opt_dense = torch.optim.SGD(model.mix.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        rng = np.random.default_rng(1000 + epoch)
        order = rng.permutation(len(train))
        negatives = rng.integers(ITEMS, size=len(train))  # one for each interaction, may be a positive now and then
        total, steps = torch.zeros(()), 0
        for i in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[i:i + BATCH][rank::world]
            u, p = torch.from_numpy(train[rows]).unbind(1)
            q = torch.from_numpy(negatives[rows])
            loss = -F.logsigmoid(model.score(u, p) - model.score(u, q)).mean()
            opt_sparse.zero_grad()
            opt_dense.zero_grad()
            loss.backward()
            for t in tables:
                t.grad = reduce_sparse(t.grad, world)
            g = model.mix.weight.grad
            dist.all_reduce(g)
            g /= world
            opt_sparse.step()
            opt_dense.step()
            total, steps = total + loss.detach(), steps + 1
        dist.all_reduce(total)
        hr = hit_rate(model, held_out, seen)
        if rank == 0:
            print(f"epoch {epoch} steps {steps} loss {total / steps / world:.5f} HR@10 {hr:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
