"""Three tasks with missing labels and gradient surgery (PCGrad) on the gradients of the global batch."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Trunk(nn.Module):
    def __init__(self, inputs=10, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.LayerNorm(width),
                                  nn.Linear(width, width), nn.GELU())
        self.heads = nn.ModuleDict({"price": nn.Linear(width, 1), "kind": nn.Linear(width, 3),
                                    "late": nn.Linear(width, 1)})

    def forward(self, x):
        h = self.body(x)
        return {k: head(h) for k, head in self.heads.items()}


def make_rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    price = x[:, 0] * x[:, 1] + x[:, 2] + 0.1 * torch.randn(n, generator=g)
    kind = torch.stack([x[:, 3], x[:, 4] - 0.3, x[:, 0] - x[:, 5]], 1).argmax(1)
    late = ((x[:, 6] - x[:, 1] + 0.3 * torch.randn(n, generator=g)) > 0.8).double()
    known = torch.rand(n, 3, generator=g) < torch.tensor([0.9, 0.6, 0.35])
    return {"x": x, "price": price, "kind": kind, "late": late, "known": known}


def rows(table, ids):
    return {k: v[ids] for k, v in table.items()}


def task_sums(out, part):
    """Sum of each task's loss over the rows whose label is known."""
    each = (F.mse_loss(out["price"].squeeze(1), part["price"], reduction="none"),
            F.cross_entropy(out["kind"], part["kind"], reduction="none"),
            F.binary_cross_entropy_with_logits(out["late"].squeeze(1), part["late"], reduction="none"))
    return [(e * known).sum() for e, known in zip(each, part["known"].T)]


def all_sum(t):
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


def flat_grad(loss, params):
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(params, grads)])


def pcgrad(grads, generator):
    """grads: [tasks, parameters] of the global batch."""
    out = grads.clone()
    for i in range(len(grads)):
        for j in torch.randperm(len(grads), generator=generator).tolist():
            if i != j:
                dot = out[i] @ grads[j]
                if dot < 0:
                    out[i] -= dot / grads[j].square().sum().clamp(min=1e-12) * grads[j]
    return out.sum(0)


def evaluate(net, table, rank, world):
    ids = torch.arange(len(table["x"])).tensor_split(world)[rank]
    part = rows(table, ids)
    with torch.no_grad():
        out = net(part["x"])
        known = part["known"].double()
        price = part["price"]
        s = torch.stack([
            *task_sums(out, part),
            (price * known[:, 0]).sum(), (price.square() * known[:, 0]).sum(),
            ((out["kind"].argmax(1) == part["kind"]) * known[:, 1]).sum(),
            (((out["late"].squeeze(1) > 0).double() == part["late"]) * known[:, 2]).sum(),
            *known.sum(0)])
    s = all_sum(s)
    sse, _, _, first, second, kind, late, n_price, n_kind, n_late = s.tolist()
    return {"r2": 1 - sse / (second - first ** 2 / n_price), "kind": kind / n_kind, "late": late / n_late}


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Trunk()
    params = list(net.parameters())
    optim = torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    train, test = make_rows(1030, 1), make_rows(333, 2)
    surgery = torch.Generator().manual_seed(3)  # same projections everywhere
    conflicts = 0
    for epoch in range(4):
        order = torch.randperm(1030, generator=torch.Generator().manual_seed(100 + epoch))
        for ids in order.split(50):  # 20 batches of 50 and one of 30, cut in uneven shards
            part = rows(train, ids.tensor_split(world)[rank])
            counts = all_sum(part["known"].sum(0).double())
            sums = task_sums(net(part["x"]), part)
            grads = torch.stack([flat_grad(s / c.clamp(min=1), params) for s, c in zip(sums, counts)])
            all_sum(grads)
            conflicts += int(((grads @ grads.T) < 0).sum()) // 2
            step = pcgrad(grads, surgery)
            for p, piece in zip(params, step.split([p.numel() for p in params])):
                p.grad = piece.view_as(p)
            nn.utils.clip_grad_norm_(params, 3.0)
            optim.step()
        scores = evaluate(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} conflicts {conflicts} " + " ".join(f"{k} {v:.10f}" for k, v in scores.items()))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
