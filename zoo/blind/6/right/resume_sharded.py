"""Stops in the middle of an epoch and goes on. Each rank keeps a file of its own with its part of the state."""
import argparse
import pathlib
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class PositionedSampler(Sampler):
    """Order of the epoch from (seed, epoch); starts where it was told."""

    def __init__(self, n, batch, seed):
        self.n, self.batch, self.seed = n, batch, seed
        self.epoch = self.position = 0

    def __iter__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + 31 * self.epoch))
        start, self.position = self.position, 0
        for i in range(start, self.n, self.batch):
            yield order[i:i + self.batch][rank::world].tolist()


class RowDropout(nn.Module):
    """Dropout whose mask hangs on row number and step."""

    def forward(self, h, rows, step):
        if not self.training:
            return h
        keep = [torch.rand(h.shape[1], generator=torch.Generator().manual_seed(7919 * step + int(r))) for r in rows]
        return h * (torch.stack(keep) > 0.25) / 0.75


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(64, 50), RowDropout(), nn.Linear(50, 10)

    def forward(self, x, rows, step):
        return self.b(self.drop(torch.relu(self.a(x)), rows, step))


class Session:
    def __init__(self, folder, args):
        self.file = folder / f"part{dist.get_rank()}.pt"
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
        data = TensorDataset(x[:1000], y[:1000], torch.arange(1000))
        self.sampler = PositionedSampler(1000, args.batch, 5)
        self.loader = DataLoader(data, batch_sampler=self.sampler)
        torch.manual_seed(18)
        self.ddp = DDP(Net())
        self.opt = torch.optim.AdamW(self.ddp.parameters(), lr=3e-3, eps=1e-5)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda s: min(1, (s + 1) / 10) * 0.97 ** s)
        self.args, self.step, self.loss_sum = args, 0, 0.0

    def parts(self):
        return dict(model=self.ddp.module, opt=self.opt, sched=self.sched)

    def save(self, position):
        state = {k: v.state_dict() for k, v in self.parts().items()}
        torch.save((state, self.step, self.sampler.epoch, position, self.loss_sum), self.file)

    def load(self):
        state, self.step, self.sampler.epoch, self.sampler.position, self.loss_sum = torch.load(self.file)
        for k, v in self.parts().items():
            v.load_state_dict(state[k])

    def run(self, stop=None):
        while self.sampler.epoch < self.args.epochs:
            position = self.sampler.position
            for x, y, rows in self.loader:
                loss = nn.functional.cross_entropy(self.ddp(x, rows, self.step), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                self.loss_sum += loss.item()
                position += self.args.batch
                if self.step == stop:
                    return self.save(position)
            self.sampler.epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--stop", type=int, default=18)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder = pathlib.Path(box[0])
    session = Session(folder, args)
    if args.stop:
        session.run(args.stop)
        session = Session(folder, args)
        session.load()
    session.run()
    mean = torch.tensor(session.loss_sum / session.step)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{session.step} steps, mean loss {mean.item() / dist.get_world_size():.5f}")
        shutil.rmtree(folder)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
