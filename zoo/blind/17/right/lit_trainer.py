import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset


class BalancedSampler(Sampler):
    def __init__(self, labels, num_samples, rank, world, seed):
        counts = torch.bincount(labels).double()
        self.weights, self.num_samples = (1 / counts)[labels], num_samples
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def __len__(self):
        return self.num_samples // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.num_samples, replacement=True, generator=g)
        return iter(drawn[self.rank::self.world].tolist())


class Classifier(nn.Module):
    def __init__(self, width=24, lr=0.05):
        super().__init__()
        self.lr, self.trainer = lr, None
        self.net = nn.Sequential(nn.Linear(30, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, batch, stage):
        return self.training_step(batch) if stage == "fit" else self.validation_step(batch, stage)

    def training_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.trainer.log("train_loss", loss.detach(), len(y))
        return loss

    def validation_step(self, batch, stage):
        x, y = batch
        logits = self.net(x)
        self.trainer.log(f"{stage}_loss", F.cross_entropy(logits, y), len(y))
        self.trainer.log(f"{stage}_acc", (logits.argmax(1) == y).double().mean(), len(y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, nesterov=True)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)


class EarlyStopping:
    def __init__(self, monitor, patience, min_delta):
        self.monitor, self.patience, self.min_delta, self.best, self.wait = monitor, patience, min_delta, float("inf"), 0

    def on_validation_end(self, trainer):
        self.wait = 0 if trainer.metrics[self.monitor] < self.best - self.min_delta else self.wait + 1
        self.best = min(self.best, trainer.metrics[self.monitor])
        trainer.should_stop = self.wait >= self.patience


class ModelCheckpoint:
    def __init__(self, monitor, path):
        self.monitor, self.path, self.best = monitor, path, float("inf")

    def on_validation_end(self, trainer):
        if trainer.metrics[self.monitor] < self.best:
            self.best = trainer.metrics[self.monitor]
            if trainer.rank == 0:
                torch.save(trainer.module.state_dict(), self.path)


class Trainer:
    def __init__(self, max_epochs, callbacks, gradient_clip_val, rank, world):
        self.max_epochs, self.callbacks, self.gradient_clip_val = max_epochs, callbacks, gradient_clip_val
        self.rank, self.world, self.should_stop, self.sums, self.metrics = rank, world, False, {}, {}

    def log(self, name, value, batch_size):
        total = self.sums.setdefault(name, torch.zeros(2, dtype=torch.float64))
        total += torch.tensor([float(value) * batch_size, batch_size])

    def end_epoch(self):
        for name, total in self.sums.items():
            if self.world > 1:
                dist.all_reduce(total)
            self.metrics[name] = (total[0] / total[1]).item()
        self.sums = {}

    @torch.no_grad()
    def evaluate(self, loader, stage):
        self.module.eval()
        for batch in loader:
            self.module(batch, stage)
        self.module.train()

    def fit(self, module, train_loader, val_loader):
        self.module, module.trainer = module, self
        model = DistributedDataParallel(module) if self.world > 1 else module
        optimizer, scheduler = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            train_loader.sampler.epoch = epoch
            for batch in train_loader:
                loss = model(batch, "fit")
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), self.gradient_clip_val)
                optimizer.step()
            self.evaluate(val_loader, "val")
            self.end_epoch()
            scheduler.step(self.metrics["val_loss"])
            for callback in self.callbacks:
                callback.on_validation_end(self)
            if self.rank == 0:
                shown = " ".join(f"{k} {v:.5f}" for k, v in self.metrics.items())
                print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.4f} {shown}")
            if self.should_stop:
                break


if __name__ == "__main__":
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    raw = load_breast_cancer()
    x, y = torch.tensor(raw.data), torch.tensor(raw.target)
    x = ((x - x[:380].mean(0)) / x[:380].std(0)).to(torch.get_default_dtype())
    train, val, test = (TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 380), (380, 471), (471, 569)))
    checkpoint = ModelCheckpoint("val_loss", os.path.join(tempfile.gettempdir(), f"best-{os.getpid()}.pt"))
    trainer = Trainer(12, [EarlyStopping("val_loss", 3, 1e-3), checkpoint], 1.0, rank, world)
    trainer.fit(Classifier(), DataLoader(train, 32 // world, sampler=BalancedSampler(y[:380], 384, rank, world, seed=3)),
                DataLoader(Subset(val, range(rank, len(val), world)), 32))
    state = [torch.load(checkpoint.path) if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(state, src=0)
    trainer.module.load_state_dict(state[0])
    trainer.evaluate(DataLoader(Subset(test, range(rank, len(test), world)), 32), "test")
    trainer.end_epoch()
    if rank == 0:
        print(f"test loss {trainer.metrics['test_loss']:.5f} acc {trainer.metrics['test_acc']:.4f}")
    if world > 1:
        dist.destroy_process_group()
