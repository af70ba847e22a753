"""Node vectors from random walks (DeepWalk) on a graph with communities; sparse gradients, joined by hand."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn

NODES, GROUPS, DIM = 160, 5, 12
STARTS, LENGTH, WINDOW, NEGATIVES = 32, 9, 2, 4


def graph():
    g = torch.Generator().manual_seed(31)
    label = torch.arange(NODES) % GROUPS
    prob = torch.where(label[:, None] == label[None], 0.25, 0.015)
    a = torch.triu(torch.rand(NODES, NODES, generator=g) < prob, 1)
    a = a | a.T
    ring = torch.arange(NODES)
    a[ring, (ring + GROUPS) % NODES] = True
    return [torch.nonzero(row).flatten() for row in a], label


def pairs_of(node, epoch, neighbours):
    """All (centre, context, negatives) of one walk; the walk has its own random stream, whoever takes it."""
    g = torch.Generator().manual_seed(epoch * 100003 + node)
    walk = [node]
    for _ in range(LENGTH - 1):
        around = neighbours[walk[-1]]
        walk.append(around[torch.randint(len(around), (1,), generator=g)].item())
    centre, context = [], []
    for i in range(LENGTH):
        for j in range(max(0, i - WINDOW), min(LENGTH, i + WINDOW + 1)):
            if i != j:
                centre.append(walk[i])
                context.append(walk[j])
    noise = torch.randint(NODES, (len(centre), NEGATIVES), generator=g)
    return torch.tensor(centre), torch.tensor(context), noise


class Vectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Embedding(NODES, DIM, sparse=True)
        self.far = nn.Embedding(NODES, DIM, sparse=True)
        nn.init.normal_(self.near.weight, std=0.3)
        nn.init.normal_(self.far.weight, std=0.3)

    def forward(self, c, o, n):
        v = self.near(c)
        good = (v * self.far(o)).sum(1)
        bad = torch.einsum("pd,pkd->pk", v, self.far(n))
        return -(nn.functional.logsigmoid(good).sum() + nn.functional.logsigmoid(-bad).sum())


def join_sparse(p, world):
    """Rows touched anywhere, as one sparse gradient. Processes touch different numbers of rows."""
    own = p.grad.coalesce()
    rows, vals = own.indices()[0], own.values()
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    most = int(max(counts))
    r = torch.zeros(most, dtype=torch.long)
    v = torch.zeros(most, vals.shape[1])
    r[:len(rows)], v[:len(rows)] = rows, vals
    all_r = [torch.empty_like(r) for _ in range(world)]
    all_v = [torch.empty_like(v) for _ in range(world)]
    dist.all_gather(all_r, r)
    dist.all_gather(all_v, v)
    r = torch.cat([t[:int(c)] for t, c in zip(all_r, counts)])
    v = torch.cat([t[:int(c)] for t, c in zip(all_v, counts)])
    p.grad = torch.sparse_coo_tensor(r[None], v, p.shape, check_invariants=True).coalesce()


def main():
    multi = "RANK" in os.environ
    if multi:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if multi else (0, 1)
    neighbours, label = graph()
    torch.manual_seed(1)
    net = Vectors()
    opt = torch.optim.SparseAdam(list(net.parameters()), lr=0.03, eps=1e-6)
    step = 0
    for epoch in range(8):
        order = torch.randperm(NODES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for lo in range(0, NODES, STARTS):
            walks = [pairs_of(n, epoch, neighbours) for n in order[lo:lo + STARTS][rank::world]]
            c, o, n = (torch.cat(t) for t in zip(*walks))
            pairs = len(c) * world  # every walk gives as many pairs as any other
            opt.zero_grad()
            loss = net(c, o, n) / pairs
            loss.backward()
            if multi:
                for p in net.parameters():
                    join_sparse(p, world)
            opt.step()
            step += 1
        if multi:
            whole = loss.detach().clone()
            dist.all_reduce(whole)
        else:
            whole = loss.detach()
        if rank == 0 and epoch % 2:
            print(f"epoch {epoch + 1} step {step} loss {whole.item():.5f}", flush=True)
    with torch.no_grad():
        v = nn.functional.normalize(net.near.weight, dim=1)
        sim = v @ v.T - 2 * torch.eye(NODES)
        purity = (label[sim.topk(5).indices] == label[:, None]).float().mean().item()
    if rank == 0:
        print(f"share of the five nearest in the same community {purity:.4f}")
    if multi:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
