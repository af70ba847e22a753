"""AMP training that can stop anywhere inside an epoch and pick up at the next batch."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class PositionedSampler(Sampler):
    def __init__(self, n, batch, rank, world, seed):
        self.n, self.batch, self.rank, self.world, self.seed = n, batch, rank, world, seed
        self.epoch = 0
        self.first_batch = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(self.n, generator=g).tolist()
        span = self.batch * self.world
        for b in range(self.first_batch, self.n // span):
            yield order[b * span:(b + 1) * span][self.rank::self.world]

    def __len__(self):
        return self.n // (self.batch * self.world) - self.first_batch


def make_model(dropout):
    return nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(96, 96), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(96, 10))


class Job:
    def __init__(self, args, data):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.x, self.y = data
        self.sampler = PositionedSampler(1320, args.batch_size, self.rank, self.world, args.seed)
        self.loader = DataLoader(TensorDataset(self.x[:1320], self.y[:1320]), batch_sampler=self.sampler)
        torch.manual_seed(args.seed)
        self.net = make_model(args.dropout)
        self.model = DDP(self.net)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=15)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.98)
        self.epoch = self.batch = self.step = 0
        torch.manual_seed(args.seed + 1 + self.rank)  # dropout masks differ between processes

    def save(self, folder):
        torch.save(torch.get_rng_state(), os.path.join(folder, f"rng_{self.rank}.pt"))
        if self.rank == 0:
            torch.save({
                "net": self.net.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                "scaler": self.scaler.state_dict(), "epoch": self.epoch, "batch": self.batch, "step": self.step,
            }, os.path.join(folder, "state.pt"))
        dist.barrier()

    def load(self, folder):
        st = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        self.net.load_state_dict(st["net"])
        self.opt.load_state_dict(st["opt"])
        self.sched.load_state_dict(st["sched"])
        self.scaler.load_state_dict(st["scaler"])
        self.epoch, self.batch, self.step = st["epoch"], st["batch"], st["step"]
        torch.set_rng_state(torch.load(os.path.join(folder, f"rng_{self.rank}.pt"), weights_only=True))

    def run(self, stop_after=None):
        loss_fn = nn.CrossEntropyLoss()
        while self.epoch < self.args.epochs:
            self.sampler.epoch, self.sampler.first_batch = self.epoch, self.batch
            self.model.train()
            rng = torch.get_rng_state()
            it = iter(self.loader)
            torch.set_rng_state(rng)  # the loader draws a base seed when an iterator is made
            for x, y in it:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_fn(self.model(x), y)
                self.opt.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.opt)
                nn.utils.clip_grad_norm_(self.net.parameters(), 3.0)
                self.scaler.step(self.opt)
                self.scaler.update()
                self.sched.step()
                self.batch += 1
                self.step += 1
                if self.rank == 0 and self.step % 5 == 0:
                    print(f"step {self.step} (epoch {self.epoch}, batch {self.batch}) loss {loss.item():.4f} scale {self.scaler.get_scale():.0f}")
                if self.step == stop_after:
                    return
            self.epoch += 1
            self.batch = 0
            acc = self.evaluate()
            if self.rank == 0:
                print(f"epoch {self.epoch} done, held-out accuracy {acc:.4f}")

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        xs, ys = self.x[1320:][self.rank::self.world], self.y[1320:][self.rank::self.world]
        c = torch.tensor([(self.net(xs).argmax(1) == ys).sum().item(), len(ys)])
        dist.all_reduce(c)
        return c[0].item() / c[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=33, help="samples per process and step")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=17)
    ap.add_argument("--preempt-at", type=int, default=13, help="0: run through")
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    d = load_digits()
    data = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    job = Job(args, data)
    if args.preempt_at:
        folder = [tempfile.mkdtemp(prefix="midepoch_") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder, src=0)
        job.run(stop_after=args.preempt_at)
        job.save(folder[0])
        job = Job(args, data)
        job.load(folder[0])
        if job.rank == 0:
            print(f"restarted from {folder[0]}: epoch {job.epoch} batch {job.batch}")
    job.run()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
