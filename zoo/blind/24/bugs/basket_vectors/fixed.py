"""Next-item prediction from shopping baskets, sparse gradients for the item table."""
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn

ITEMS, DIM, BASKET = 400, 24, 6


def baskets(n, seed):
    rnd = random.Random(seed)
    rows = []
    for _ in range(n):
        aisle = rnd.randrange(20)
        rows.append([aisle * 20 + rnd.randrange(20) for _ in range(BASKET + 1)])
    return torch.tensor(rows)


class BasketModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, DIM, mode="mean", sparse=True)
        self.mix = nn.Linear(DIM, DIM)
        self.score = nn.Linear(DIM, ITEMS)

    def forward(self, ids):
        return self.score(torch.tanh(self.mix(self.items(ids))))


class Comm:
    def __init__(self):
        self.active = "RANK" in os.environ
        if self.active:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.active else 0
        self.size = dist.get_world_size() if self.active else 1

    def mean_grads(self, model):
        if not self.active:
            return
        for p in model.parameters():
            if p.grad.is_sparse:
                p.grad = self.merge_sparse(p.grad)
            else:
                dist.all_reduce(p.grad)
                p.grad.div_(self.size)

    def merge_sparse(self, grad):
        # every process looked up the same number of items, so the raw entries have one shape
        idx, val = grad._indices().contiguous(), grad._values().contiguous()
        all_idx = [torch.empty_like(idx) for _ in range(self.size)]
        all_val = [torch.empty_like(val) for _ in range(self.size)]
        dist.all_gather(all_idx, idx)
        dist.all_gather(all_val, val)
        merged = torch.sparse_coo_tensor(torch.cat(all_idx, 1), torch.cat(all_val) / self.size, grad.shape)
        return merged.coalesce()

    def close(self):
        if self.active:
            dist.destroy_process_group()


def main():
    comm = Comm()
    torch.manual_seed(77)
    model = BasketModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    data = baskets(960, seed=5)
    batch = 96
    for epoch in range(4):
        order = list(range(len(data)))
        random.Random(epoch).shuffle(order)
        losses = []
        for at in range(0, len(order), batch):
            mine = order[at:at + batch][comm.rank::comm.size]
            rows = data[mine]
            loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
            optimizer.zero_grad()
            loss.backward()
            comm.mean_grads(model)
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        if comm.active:
            dist.all_reduce(mean)
        if comm.rank == 0:
            print("epoch", epoch, "loss", f"{mean.item() / comm.size:.5f}", flush=True)
    time.sleep(0.3)
    comm.close()


if __name__ == "__main__":
    main()
