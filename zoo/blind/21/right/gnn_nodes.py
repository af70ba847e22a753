"""Graph network on a citation-like graph: every rank sees the graph, the labelled nodes are divided."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NODES, CLASSES, FEATS, PATIENCE = 300, 5, 16, 4


def graph():
    g = torch.Generator().manual_seed(23)
    label = torch.randint(0, CLASSES, (NODES,), generator=g)
    same = label[:, None] == label[None]
    p = torch.where(same, 0.05, 0.008)
    adj = (torch.rand(NODES, NODES, generator=g) < p).triu(1)
    adj = (adj | adj.T).to(torch.get_default_dtype()) + torch.eye(NODES)
    deg = adj.sum(1).rsqrt()
    norm = deg[:, None] * adj * deg[None]
    means = torch.randn(CLASSES, FEATS, generator=g)
    feats = 0.6 * means[label] + torch.randn(NODES, FEATS, generator=g)
    perm = torch.randperm(NODES, generator=g)
    return norm, feats, label, perm[:70], perm[70:170], perm[170:]


class Layer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.own, self.near = nn.Linear(a, b), nn.Linear(a, b, bias=False)

    def forward(self, adj, h):
        return self.own(h) + adj @ self.near(h)


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(FEATS, 32), Layer(32, CLASSES)

    def forward(self, adj, x):
        return self.two(adj, F.elu(self.one(adj, x)))


def owned(nodes, rank, world):
    """Blocks of consecutive node ids belong to one rank, so the shares of a split are uneven."""
    return nodes[nodes * world // NODES == rank]


class Comm:
    def __init__(self):
        self.on = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if self.on:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.on else 0
        self.world = dist.get_world_size() if self.on else 1

    def sum(self, t):
        if self.on:
            dist.all_reduce(t)
        return t

    def close(self):
        if self.on:
            dist.destroy_process_group()


def main():
    comm = Comm()
    adj, x, label, train, valid, test = graph()
    mine = {k: owned(v, comm.rank, comm.world) for k, v in dict(train=train, valid=valid, test=test).items()}
    torch.manual_seed(1)
    net = GNN()
    opt = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=5e-4)
    best, best_state, bad = float("inf"), None, 0

    for epoch in range(60):
        net.train()
        out = net(adj, x)
        loss = F.cross_entropy(out[mine["train"]], label[mine["train"]], reduction="sum") / len(train)
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            comm.sum(p.grad)
        opt.step()
        net.eval()
        with torch.no_grad():
            out = net(adj, x)
            local = F.cross_entropy(out[mine["valid"]], label[mine["valid"]], reduction="sum")
        value = comm.sum(local).item() / len(valid)
        if value < best - 1e-3:
            best, best_state, bad = value, copy.deepcopy(net.state_dict()), 0
        else:
            bad += 1
        if epoch % 10 == 0 and comm.rank == 0:
            print(f"epoch {epoch} validation {value:.5f}")
        if bad >= PATIENCE:
            break

    net.load_state_dict(best_state)
    with torch.no_grad():
        out = net(adj, x).argmax(1)
    right = comm.sum((out[mine["test"]] == label[mine["test"]]).sum())
    if comm.rank == 0:
        print(f"stopped after {epoch} best {best:.5f} test accuracy {right.item() / len(test):.4f}")
    comm.close()


if __name__ == "__main__":
    main()
