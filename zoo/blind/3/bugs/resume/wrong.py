import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 96
EPOCHS = 3


def build_net():
    torch.manual_seed(42)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, 48), nn.ReLU(), nn.Linear(48, 10),
    )


class Trainer:
    """Trains for EPOCHS; picks up from the last snapshot in `folder` if there is one."""

    def __init__(self, dataset, folder):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.path = os.path.join(folder, "snapshot.pt")
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=17)
        self.loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // self.world, sampler=self.sampler, drop_last=True)
        self.model = DDP(build_net())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=EPOCHS * len(self.loader))
        self.loss_fn = nn.CrossEntropyLoss()
        self.epoch = self.step = self.samples = 0
        if os.path.exists(self.path):
            self.load()

    def save(self):
        if self.rank == 0:
            torch.save({
                "model": self.model.module.state_dict(),
                "opt": self.opt.state_dict(),
                "sched": self.sched.state_dict(),
                "epoch": self.epoch, "step": self.step, "samples": self.samples,
            }, self.path + ".tmp")
            os.replace(self.path + ".tmp", self.path)
        dist.barrier()

    def load(self):
        snap = torch.load(self.path, map_location="cpu")
        self.model.module.load_state_dict(snap["model"])
        self.opt.load_state_dict(snap["opt"])
        self.sched.load_state_dict(snap["sched"])
        self.epoch, self.step, self.samples = snap["epoch"], snap["step"], snap["samples"]
        if self.rank == 0:
            print(f"resuming at epoch {self.epoch}, step {self.step}, {self.samples} samples into the epoch", flush=True)

    def fit(self, max_steps=None):
        while self.epoch < EPOCHS:
            self.sampler.set_epoch(self.epoch)
            skip = self.samples // self.loader.batch_size
            for i, (x, y) in enumerate(self.loader):
                if i < skip:
                    continue
                loss = self.loss_fn(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                self.samples += x.size(0) * self.world
                if self.rank == 0 and self.step % 5 == 0:
                    print(f"epoch {self.epoch} step {self.step} loss {loss.item():.4f}", flush=True)
                if max_steps is not None and self.step >= max_steps:
                    self.save()
                    return False
            self.epoch += 1
            self.samples = 0
        self.save()
        return True


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    box = [tempfile.mkdtemp(prefix="digits_") if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    folder = box[0]

    raw = load_digits()
    X = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    Y = torch.tensor(raw.target)
    train_set = TensorDataset(X[:1440], Y[:1440])

    # the queue on our cluster gives short slots: train a bit, save, go on in the next job
    Trainer(train_set, folder).fit(max_steps=20)
    trainer = Trainer(train_set, folder)
    trainer.fit()
    acc = accuracy(trainer.model.module, X[1440:], Y[1440:])
    if rank == 0:
        print(f"finished after {trainer.step} steps, accuracy {acc:.4f}")
        shutil.rmtree(folder)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
