"""Training that keeps the best weights by validation loss and tests them at the end."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BEST = Path("best_weights.pt")


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    return TensorDataset(x, (x.norm(dim=1) > 1.1).long())


def test(model, loader):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            totals[0] += nn.functional.cross_entropy(out, y, reduction="sum").item()
            totals[1] += (out.argmax(1) == y).sum().item()
            totals[2] += len(y)
    dist.all_reduce(totals)
    return totals[0].item() / totals[2].item(), totals[1].item() / totals[2].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parts = {name: rings(n, s) for name, n, s in (("train", 96, 0), ("val", 48, 1), ("test", 64, 2))}
    samplers = {name: DistributedSampler(part, shuffle=name == "train") for name, part in parts.items()}
    loaders = {name: DataLoader(parts[name], 16 // world, sampler=samplers[name]) for name in parts}
    model = DDP(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.5, momentum=0.8)
    best = float("inf")
    for epoch in range(3):
        samplers["train"].set_epoch(epoch)
        model.train()
        for x, y in loaders["train"]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        val_loss, _ = test(model, loaders["val"])
        if val_loss < best:
            best = val_loss
            if rank == 0:
                torch.save(model.module.state_dict(), BEST)
        if rank == 0:
            print(f"epoch {epoch} val loss {val_loss:.4f}")
    dist.barrier()
    model.module.load_state_dict(torch.load(BEST))
    test_loss, accuracy = test(model, loaders["test"])
    if rank == 0:
        print(f"test loss {test_loss:.6f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
