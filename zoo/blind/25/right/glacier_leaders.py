"""Glacier melt forecast; gradients are summed inside a pair of workers first, then among pair leaders.

Melt series are synthetic.  Training ends early by the validation error of all stations, and the best
weights are put back.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn


class Topology:
    """Workers 2k and 2k+1 share a host; the even one is its leader."""

    def __init__(self, rank, world):
        self.rank = rank
        self.host, self.leader_of_host = None, None
        leaders = list(range(0, world, 2))
        for lead in leaders:
            members = [r for r in (lead, lead + 1) if r < world]
            group = dist.new_group(members)
            if rank in members:
                self.host, self.leader_of_host = group, lead
        self.leaders = dist.new_group(leaders)

    def total_(self, t):
        dist.reduce(t, dst=self.leader_of_host, group=self.host)
        if self.rank == self.leader_of_host:
            dist.all_reduce(t, group=self.leaders)
        dist.broadcast(t, src=self.leader_of_host, group=self.host)
        return t


def series(n=420, seed=60):
    g = torch.Generator().manual_seed(seed)
    phase = torch.rand(n, 1, generator=g) * 6.28
    amp = 0.5 + torch.rand(n, 1, generator=g)
    t = torch.arange(20.0)
    s = amp * torch.sin(0.5 * t + phase) + 0.03 * t + 0.1 * torch.randn(n, 20, generator=g)
    return s[:, :16], s[:, 16:].mean(1)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    topo = Topology(rank, world)
    x, y = series()
    xt, yt, xv, yv = x[:320], y[:320], x[320:], y[320:]

    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    best, best_state, bad = float("inf"), None, 0
    gen = torch.Generator().manual_seed(62)
    steps = 0

    for epoch in range(12):
        order = torch.randperm(320, generator=gen)
        host_rows = 0
        for start in range(0, 320, 80):
            rows = order[start:start + 80].view(-1, world)[:, rank]
            opt.zero_grad()
            loss = (model(xt[rows]).squeeze(1) - yt[rows]).abs().sum() / 80
            loss.backward()
            for p in model.parameters():
                topo.total_(p.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            host_rows += len(rows)
            steps += 1
        # stations of the validation set are cut unevenly, nothing is repeated
        cut = xv.tensor_split(world)[rank], yv.tensor_split(world)[rank]
        with torch.no_grad():
            part = torch.stack([(model(cut[0]).squeeze(1) - cut[1]).square().sum(), torch.tensor(float(len(cut[1])))])
        of_host = part.clone()
        dist.all_reduce(of_host, group=topo.host)
        topo.total_(part)
        val = (part[0] / part[1]).item()
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch + 1} validation {val:.6f}; this host {(of_host[0] / of_host[1]).item():.6f}"
                  f" ({host_rows} rows trained by me)", flush=True)
        if val < best - 1e-3:
            best, bad = val, 0
            best_state = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            bad += 1
            if bad == 3:
                break
    model.load_state_dict(best_state)
    if rank == 0:
        print(f"stopped after {steps} steps, best validation {best:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
