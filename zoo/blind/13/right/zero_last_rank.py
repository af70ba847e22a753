"""Forecasting a set of noisy oscillators with ZeroRedundancyOptimizer; the last process writes the checkpoint.

Eight simulators run for ever, each with a random stream of its own. They are dealt out to the processes and
carried over a restart together with weights, optimizer and schedule.
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

SIMULATORS, WINDOW, PER_SIM = 8, 12, 6
CUT, STEPS = 19, 40


class Simulator:
    def __init__(self, number):
        self.number = number
        self.noise = torch.Generator().manual_seed(1000 + number)
        self.state = torch.randn(2, generator=self.noise)

    def advance(self, n):
        w = 0.25 + 0.05 * self.number
        out = []
        for _ in range(n):
            p, v = self.state
            v = v - w * p - 0.1 * v * (p * p - 1)
            p = p + w * v
            self.state = torch.stack([p, v]).clamp(-4, 4) + 0.02 * torch.randn(2, generator=self.noise)
            out.append(self.state[0].clone())
        return torch.stack(out)

    def windows(self):
        series = self.advance(WINDOW + PER_SIM)
        x = torch.stack([series[k:k + WINDOW] for k in range(PER_SIM)])
        return x, series[WINDOW:]

    def get(self):
        return {"state": self.state, "noise": self.noise.get_state()}

    def set(self, saved):
        self.state = saved["state"].clone()
        self.noise.set_state(saved["noise"])


class Run:
    def __init__(self, seed):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed + self.rank)
        net = nn.Sequential(nn.Linear(WINDOW, 48), nn.Mish(), nn.Linear(48, 48), nn.Mish(), nn.Linear(48, 1))
        self.net = DDP(net, gradient_as_bucket_view=True)
        self.opt = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.AdamW, lr=4e-3,
                                           weight_decay=0.05, parameters_as_bucket_view=True)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.opt, [12, 28], gamma=0.5)
        self.sims = [Simulator(k) for k in range(SIMULATORS)][self.rank::self.world]
        self.step = 0

    def save(self, path):
        writer = self.world - 1
        self.opt.consolidate_state_dict(to=writer)
        sims = [None] * self.world
        dist.all_gather_object(sims, {s.number: s.get() for s in self.sims})
        if self.rank == writer:
            torch.save({"net": self.net.module.state_dict(), "opt": self.opt.state_dict(),
                        "sched": self.sched.state_dict(), "step": self.step,
                        "sims": {k: v for part in sims for k, v in part.items()}}, path)
        dist.barrier()

    def load(self, path):
        saved = torch.load(path, weights_only=False)
        self.net.module.load_state_dict(saved["net"])
        self.opt.load_state_dict(saved["opt"])
        self.sched.load_state_dict(saved["sched"])
        self.step = saved["step"]
        for s in self.sims:
            s.set(saved["sims"][s.number])

    def train(self, until):
        while self.step < until:
            x, y = (torch.cat(part) for part in zip(*(s.windows() for s in self.sims)))
            loss = nn.functional.huber_loss(self.net(x).squeeze(1), y)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.opt.step()
            self.sched.step()
            self.step += 1
            if self.step % 8 == 0:
                value = loss.detach().clone()
                dist.reduce(value, 0)
                if self.rank == 0:
                    print(f"step {self.step} loss {value.item() / self.world:.5f} lr {self.sched.get_last_lr()[0]:.4f}")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    path = os.path.join(box[0], "oscillators.pt")

    run = Run(seed=0)
    run.train(CUT)
    run.save(path)

    run = Run(seed=333)
    run.load(path)
    run.train(STEPS)

    error = torch.zeros(SIMULATORS)
    with torch.no_grad():
        for s in run.sims:
            x, y = s.windows()
            error[s.number] = (run.net.module(x).squeeze(1) - y).abs().mean()
    dist.all_reduce(error)
    if rank == 0:
        print("error " + " ".join(f"{e:.4f}" for e in error.tolist()))
        os.remove(path)
        os.rmdir(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
