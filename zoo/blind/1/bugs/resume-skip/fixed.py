"""Trains an autoencoder; can be stopped in the middle of an epoch and continued with --resume."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32, help="per process")
    ap.add_argument("--stop-after", type=int, default=0, help="save and leave after so many steps")
    ap.add_argument("--checkpoint", default="autoencoder.pt")
    ap.add_argument("--resume", action="store_true")
    return ap.parse_args()


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 12))
        self.decoder = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def save(path, model, opt, step, epoch, samples_in_epoch):
    state = {"model": model.module.state_dict(), "opt": opt.state_dict(),
             "step": step, "epoch": epoch, "samples_in_epoch": samples_in_epoch}
    if dist.get_rank() == 0:
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.tensor(load_digits().data, dtype=torch.float32)[:1024] / 16
    data = TensorDataset(x)
    sampler = DistributedSampler(data, shuffle=True, seed=77)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(AE())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)

    step, first_epoch, skip = 0, 0, 0
    if args.resume:
        ck = torch.load(args.checkpoint, map_location="cpu")
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        step, first_epoch = ck["step"], ck["epoch"]
        skip = ck["samples_in_epoch"] // (args.batch_size * world)
        if rank == 0:
            print(f"resumed at step {step}, epoch {first_epoch}")

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        seen = 0
        for i, (xb,) in enumerate(loader):
            seen += len(xb) * world
            if epoch == first_epoch and i < skip:
                continue
            loss = nn.functional.mse_loss(model(xb), xb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.5f}")
            if step == args.stop_after:
                save(args.checkpoint, model, opt, step, epoch, seen)
                dist.destroy_process_group()
                return
    save(args.checkpoint, model, opt, step, args.epochs, 0)
    if rank == 0:
        print(f"finished after {step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
