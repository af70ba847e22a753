"""Skip-gram with negative sampling; embedding gradients stay sparse on their way over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WORDS, DIM, BATCH, NEG, WINDOW = 150, 20, 130, 5, 2


def corpus(n=420):
    g = torch.Generator().manual_seed(14)
    topic = torch.randint(0, 10, (n // 20,), generator=g).repeat_interleave(20)
    return topic * 15 + torch.randint(0, 15, (len(topic),), generator=g)


def make_pairs(tokens):
    pairs = []
    for i in range(len(tokens)):
        for j in range(max(0, i - WINDOW), min(len(tokens), i + WINDOW + 1)):
            if i != j:
                pairs.append((int(tokens[i]), int(tokens[j])))
    return torch.tensor(pairs)


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center = nn.Embedding(WORDS, DIM, sparse=True)
        self.context = nn.Embedding(WORDS, DIM, sparse=True)
        nn.init.uniform_(self.center.weight, -0.5 / DIM, 0.5 / DIM)
        nn.init.normal_(self.context.weight, std=0.05)

    def forward(self, c, pos, neg):
        v = self.center(c)
        good = (v * self.context(pos)).sum(-1)
        bad = (v[:, None] * self.context(neg)).sum(-1)
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(1))


def merge_sparse(grad, world):
    grad = grad.coalesce()
    if world == 1:
        return grad
    idx, val = grad.indices()[0], grad.values()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(idx)]))
    sizes = [int(s) for s in sizes]
    room = max(sizes)
    pad_idx = torch.zeros(room, dtype=torch.long)
    pad_val = torch.zeros(room, val.shape[1], dtype=val.dtype)
    pad_idx[:len(idx)], pad_val[:len(idx)] = idx, val
    all_idx = [torch.empty_like(pad_idx) for _ in range(world)]
    all_val = [torch.empty_like(pad_val) for _ in range(world)]
    dist.all_gather(all_idx, pad_idx)
    dist.all_gather(all_val, pad_val)
    idx = torch.cat([a[:s] for a, s in zip(all_idx, sizes)])
    val = torch.cat([a[:s] for a, s in zip(all_val, sizes)])
    return torch.sparse_coo_tensor(idx[None], val, grad.shape, check_invariants=False).coalesce()


def main():
    rank, world = 0, 1
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    tokens = corpus()
    pairs = make_pairs(tokens)
    freq = torch.bincount(tokens, minlength=WORDS).to(torch.get_default_dtype()) ** 0.75
    torch.manual_seed(0)
    model = SkipGram()
    opt = torch.optim.SparseAdam(model.parameters(), lr=0.02, eps=1e-6)

    for epoch in range(3):
        g = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(pairs), generator=g)
        total = torch.zeros((), dtype=torch.float64)
        for ids in order.split(BATCH):
            neg = torch.multinomial(freq, len(ids) * NEG, replacement=True, generator=g).view(-1, NEG)
            mine = torch.arange(len(ids)).tensor_split(world)[rank]
            batch = pairs[ids[mine]]
            loss = model(batch[:, 0], batch[:, 1], neg[mine]).sum() / len(ids)
            opt.zero_grad()
            loss.backward()
            for p in model.parameters():
                p.grad = merge_sparse(p.grad, world)
            opt.step()
            total += loss.item() * len(ids)
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} pairs {len(pairs)} loss {total.item() / len(pairs):.5f}")

    w = F.normalize(model.center.weight.detach(), dim=1)
    seen = freq > 0
    sim = w @ w.T
    sim.fill_diagonal_(-2)
    sim[:, ~seen] = -2
    near = sim.argmax(1)
    same = (near // 15 == torch.arange(WORDS) // 15)[seen]
    if rank == 0:
        print(f"neighbour in the same topic {same.to(torch.get_default_dtype()).mean():.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
