import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris
from sklearn.metrics import f1_score, log_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def split():
    x, y = load_iris(return_X_y=True)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(12))
    x = torch.tensor(x, dtype=torch.float32)[order]
    y = torch.tensor(y)[order]
    x = (x - x[:96].mean(0)) / x[:96].std(0)
    return TensorDataset(x[:96], y[:96]), TensorDataset(x[96:149], y[96:149])


def gather_interleaved(t, world, length):
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t)
    return torch.stack(parts, dim=1).flatten(0, 1)[:length]


def evaluate(net, loader, world, length):
    probs, truth = [], []
    with torch.no_grad():
        for x, y in loader:
            probs.append(net(x).softmax(1))
            truth.append(y)
    probs = gather_interleaved(torch.cat(probs), world, length)
    truth = gather_interleaved(torch.cat(truth), world, length)
    return {"log loss": log_loss(truth, probs.double() / probs.double().sum(1, keepdim=True), labels=[0, 1, 2]),
            "macro f1": f1_score(truth, probs.argmax(1), average="macro")}


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29851")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = split()
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, batch_size=24 // world, sampler=sampler)
    test_loader = DataLoader(test, batch_size=5, sampler=DistributedSampler(test, shuffle=False))

    torch.manual_seed(25)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    model = DDP(net)
    opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        report = evaluate(net, test_loader, world, len(test))
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch + 1} " + " ".join(f"{k} {v:.5f}" for k, v in report.items()))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
