"""Full-graph GCN with the nodes spread over the processes in blocks; early stopping on validation accuracy."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NODES, GROUPS, FEATURES, HIDDEN = 203, 4, 16, 24
MAX_EPOCHS, PATIENCE = 80, 12


class Partition:
    """Contiguous blocks of nodes, the first ones longer by one where the number does not divide."""

    def __init__(self):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")
        self.rows = torch.arange(NODES).tensor_split(self.world)[self.rank]

    def total(self, t):
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def assemble(self, local):
        return Assemble.apply(local, self)


class Assemble(torch.autograd.Function):
    """Rows of all nodes from the blocks of all ranks."""

    @staticmethod
    def forward(ctx, local, part):
        ctx.part = part
        full = local.new_zeros(NODES, local.shape[1])
        full[part.rows] = local
        return part.total(full)

    @staticmethod
    def backward(ctx, grad):
        return ctx.part.total(grad.clone(memory_format=torch.contiguous_format))[ctx.part.rows], None


def block_model_graph():
    g = torch.Generator().manual_seed(19)
    label = torch.randint(GROUPS, (NODES,), generator=g)
    prob = torch.where(label[:, None] == label[None], 0.12, 0.02)
    upper = (torch.rand(NODES, NODES, generator=g) < prob).triu(1)
    adj = (upper | upper.T | torch.eye(NODES, dtype=torch.bool)).to(torch.get_default_dtype())
    norm = adj.sum(1).rsqrt()
    adj = norm[:, None] * adj * norm[None]
    centre = torch.randn(GROUPS, FEATURES, generator=g)
    x = 0.5 * centre[label] + torch.randn(NODES, FEATURES, generator=g)
    role = torch.full((NODES,), 2)
    shuffled = torch.randperm(NODES, generator=g)
    role[shuffled[:50]] = 0
    role[shuffled[50:110]] = 1
    return adj, x, label, role


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(FEATURES, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, GROUPS)

    def forward(self, adj, x, part):
        h = F.relu(adj @ part.assemble(self.w1(x)))
        h = h + F.relu(adj @ part.assemble(self.w2(h)))
        return self.out(h)


def main():
    part = Partition()
    adj, x, label, role = block_model_graph()
    adj, x, label, role = (t[part.rows] for t in (adj, x, label, role))
    counts = part.total(torch.bincount(role, minlength=3))
    torch.manual_seed(6)
    net = Gcn()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=5e-3)
    best, best_state, waited, epoch = -1.0, None, 0, 0

    def correct():
        with torch.no_grad():
            hit = net(adj, x, part).argmax(1) == label
        return part.total(torch.stack([(hit & (role == k)).sum() for k in range(3)])) / counts

    for epoch in range(MAX_EPOCHS):
        logits = net(adj, x, part)
        known = role == 0
        loss = F.cross_entropy(logits[known], label[known], reduction="sum") / counts[0]
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            part.total(p.grad)
        opt.step()
        train_acc, val_acc, _ = correct().tolist()
        shown = part.total(loss.detach().clone()).item()
        if part.rank == 0 and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {shown:.6f}  train {train_acc:.4f}  validation {val_acc:.4f}")
        if val_acc > best:
            best, best_state, waited = val_acc, copy.deepcopy(net.state_dict()), 0
        else:
            waited += 1
            if waited >= PATIENCE:
                break

    net.load_state_dict(best_state)
    test_acc = correct()[2].item()
    if part.rank == 0:
        print(f"stopped after epoch {epoch}: best validation {best:.4f}, test {test_acc:.4f}")
    if part.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
