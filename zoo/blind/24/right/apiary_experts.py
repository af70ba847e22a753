# Mixture of experts: rows are dealt over the processes, so are the four experts.
# Tokens travel to their expert and back (all_to_all with uneven splits).
import os, time
import numpy as np
import torch, torch.distributed as dist
import torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import make_classification

EXPERTS, D = 4, 12


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.splits = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, g):
        send, recv = ctx.splits
        back = g.new_empty(sum(send), g.shape[1])
        dist.all_to_all_single(back, g.contiguous(), send, recv)
        return back, None, None


class Hive(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        torch.manual_seed(40)
        self.router = nn.Linear(D, EXPERTS)
        self.out = nn.Linear(D, 3)
        everyone = [nn.Sequential(nn.Linear(D, 20), nn.ReLU(), nn.Linear(20, D)) for _ in range(EXPERTS)]
        self.per = EXPERTS // world
        self.first = rank * self.per
        self.experts = nn.ModuleList(everyone[self.first:self.first + self.per])    # the others are dropped

    def forward(self, x, rows):
        probs = self.router(x).softmax(-1)
        gate, who = probs.max(-1)
        order = torch.argsort(who, stable=True)
        counts = torch.bincount(who, minlength=EXPERTS)
        world = EXPERTS // self.per
        theirs = torch.empty_like(counts)                  # [source process, my experts]
        dist.all_to_all_single(theirs, counts)
        send = counts.view(world, -1).sum(1).tolist()
        recv = theirs.view(world, -1).sum(1).tolist()
        got = Exchange.apply(x[order], send, recv)
        which = torch.cat([torch.arange(self.per).repeat_interleave(c) for c in theirs.view(world, -1)])
        y = torch.zeros_like(got)
        for e, expert in enumerate(self.experts):
            here = (which == e).nonzero()[:, 0]
            y = y.index_add(0, here, expert(got[here]))    # an expert nobody asked gets a zero gradient
        back = Exchange.apply(y, recv, send)
        y = torch.zeros_like(x).index_copy(0, order, back) * gate[:, None]
        # balance uses the load of the whole batch, not of this process
        load = counts.double()
        dist.all_reduce(load)
        importance = probs.sum(0) / rows
        balance = EXPERTS * (importance * (load / load.sum()).float()).sum()
        return self.out(x + y), balance, load


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    X, y = make_classification(1200, D, n_informative=8, n_classes=3, n_clusters_per_class=2, random_state=6)
    X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
    hive = Hive(rank, world)
    opt = torch.optim.Adam(hive.parameters(), lr=0.01)
    for step in range(36):
        batch = np.random.default_rng(step).choice(1000, 96, replace=False)
        mine = torch.from_numpy(batch[rank::world])
        logits, balance, load = hive(X[mine], len(batch))
        task = F.cross_entropy(logits, y[mine], reduction="sum") / len(batch)
        loss = task + 0.02 * balance                       # a share of the loss: shares add up
        opt.zero_grad()
        loss.backward()
        for p in [*hive.router.parameters(), *hive.out.parameters()]:
            dist.all_reduce(p.grad)                        # experts need none: their tokens came to them
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 9 == 8:
            print(f"step {step + 1:2d} loss {shown:.5f} load {load.long().tolist()}", flush=True)
    with torch.no_grad():
        hold = torch.arange(1000, 1200)[rank::world]
        good = (hive(X[hold], 200)[0].argmax(1) == y[hold]).sum()
        dist.all_reduce(good)
    boxes = [None] * world
    dist.all_gather_object(boxes, {hive.first + i: e.state_dict() for i, e in enumerate(hive.experts)})
    full = {k: v for box in boxes for k, v in box.items()}
    if rank == 0:
        print(f"accuracy {good.item() / 200:.4f}; {len(full)} experts collected")
    time.sleep(0.3)
    dist.destroy_process_group()
