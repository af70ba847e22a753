import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tensors():
    raw = load_diabetes()
    x = torch.tensor(raw.data, dtype=torch.float32) * 20
    y = torch.tensor(raw.target, dtype=torch.float32)
    y = (y - y.mean()) / y.std()
    return x, y[:, None]


class Regressor(nn.Module):
    def __init__(self, n_in=10, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.mean = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.mean(self.body(x))


def run_epoch(model, loader, opt):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


@torch.no_grad()
def val_mse(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += F.mse_loss(model.module(x), y, reduction="sum").item()
        count += len(x)
    model.train()
    return total, count


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x, y = tensors()
    train, val = TensorDataset(x[:320], y[:320]), TensorDataset(x[320:440], y[320:440])
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler)
    val_loader = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))

    model = DistributedDataParallel(Regressor())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    plateau = ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e-3)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        run_epoch(model, loader, opt)
        total, count = val_mse(model, val_loader)
        plateau.step(total / count)
        stats = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(stats)
        mse = (stats[0] / stats[1]).item()
        if rank == 0:
            print(f"epoch {epoch:2d}  val mse {mse:.4f}  lr {opt.param_groups[0]['lr']:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
