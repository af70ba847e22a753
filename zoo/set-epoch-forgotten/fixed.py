"""Digits with the Trainer class of the DDP tutorial series."""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every):
        self.global_rank = int(os.environ["RANK"])
        self.model = DDP(model)
        self.loader = train_data
        self.optimizer = optimizer
        self.save_every = save_every

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        losses = [self._run_batch(x, y) for x, y in self.loader]
        print(f"[rank {self.global_rank}] epoch {epoch} | steps {len(losses)} | loss {losses[-1]:.4f}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                torch.save(self.model.module.state_dict(), os.devnull)


def load_train_objs():
    digits = load_digits()
    train_set = TensorDataset(torch.tensor(digits.data[:512]).float() / 16, torch.tensor(digits.target[:512]))
    model = nn.Linear(64, 10)
    return train_set, model, torch.optim.SGD(model.parameters(), lr=0.1)


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def main(total_epochs, save_every, batch_size):
    ddp_setup()
    torch.manual_seed(0)
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer, save_every)
    trainer.train(total_epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total-epochs", default=3, type=int)
    parser.add_argument("--save-every", default=2, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    args = parser.parse_args()
    main(args.total_epochs, args.save_every, args.batch_size)
