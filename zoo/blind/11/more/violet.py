"""AdamW with states sharded by ZeroRedundancyOptimizer; saves inside the epoch and goes on from that checkpoint."""
import argparse
import os
import time
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--global-batch-size", type=int, default=64)
    p.add_argument("--interrupt-at", type=int, default=37, help="leave the first session after this step")
    p.add_argument("--ckpt", default="zero_ckpt.pt")
    return p.parse_args()


class ResumableSampler:
    """Permutation per epoch; can start at a position counted in samples of the whole job."""

    def __init__(self, n, batch, rank, world, seed=0):
        self.n, self.batch, self.rank, self.world, self.seed = n, batch, rank, world, seed
        self.epoch, self.position = 0, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, s):
        self.epoch, self.position = s["epoch"], s["position"]

    def __iter__(self):
        perm = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        while self.position + self.batch <= self.n:
            b = perm[self.position:self.position + self.batch]
            self.position += self.batch
            yield b.tensor_split(self.world)[self.rank]
        self.epoch, self.position = self.epoch + 1, 0


def build():
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    model = DDP(net)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=2e-3, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10) * 0.985 ** s)
    return model, opt, sched


def save(args, model, opt, sched, sampler, step):
    opt.consolidate_state_dict(to=0)  # collective, the full state arrives at rank 0
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}
        torch.save({**state, "sampler": sampler.state_dict(), "step": step}, args.ckpt + ".tmp")
        os.replace(args.ckpt + ".tmp", args.ckpt)
    dist.barrier()


def session(args, rank, world, x, y, resume, stop_at=None):
    torch.manual_seed(99 if resume else 5)  # weights come from the file on resume
    model, opt, sched = build()
    sampler = ResumableSampler(1408, args.global_batch_size, rank, world)
    step = 0
    if resume:
        ck = torch.load(args.ckpt, weights_only=False)
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        sampler.load_state_dict(ck["sampler"])
        step = ck["step"]
        if rank == 0:
            print(f"resumed at step {step}, epoch {sampler.epoch}, sample {sampler.position}")
    while sampler.epoch < args.epochs:
        for ids in sampler:
            loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step == stop_at:
                save(args, model, opt, sched, sampler, step)
                return model
        with torch.no_grad():
            out = model.module(x[1408:])
            val = nn.functional.cross_entropy(out, y[1408:])
        if rank == 0:
            print(f"epoch {sampler.epoch} step {step} val {val:.5f} acc {(out.argmax(1) == y[1408:]).float().mean():.4f} lr {sched.get_last_lr()[0]:.2e}")
    return model


def main():
    args = get_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30122")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    session(args, rank, world, x, y, resume=False, stop_at=args.interrupt_at)
    model = session(args, rank, world, x, y, resume=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "final.pt")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
