import os
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FILE = "best.pt"


class Fourier(nn.Module):
    def __init__(self, k=24):
        super().__init__()
        self.freq = nn.Parameter(torch.randn(2, k) * 2)
        self.mix = nn.Sequential(nn.Linear(2 * k, 32), nn.Mish(), nn.Linear(32, 2))

    def forward(self, x):
        z = x @ self.freq
        return self.mix(torch.cat([z.sin(), z.cos()], 1))


def validate(net, loader):
    net.eval()
    s = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            s[0] += nn.functional.cross_entropy(net(x), y, reduction="sum")
            s[1] += len(y)
    net.train()
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_moons(1000, noise=0.42, random_state=3)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    train = TensorDataset(x[:160], y[:160])
    valid = TensorDataset(x[160:240], y[160:240])
    ts = DistributedSampler(train, seed=1)
    vs = DistributedSampler(valid, shuffle=False)
    tl = DataLoader(train, 32 // world, sampler=ts)
    vl = DataLoader(valid, 20, sampler=vs)

    torch.manual_seed(19)
    net = Fourier()
    ddp = DistributedDataParallel(net)
    opt = torch.optim.AdamW(net.parameters(), lr=8e-3)
    best = float("inf")
    for epoch in range(16):
        ts.set_epoch(epoch)
        for bx, by in tl:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(bx), by).backward()
            opt.step()
        val = validate(net, vl)
        if val < best:
            best = val
            if rank == 0:
                torch.save({"epoch": epoch, "net": net.state_dict()}, FILE)
    dist.barrier()
    kept = torch.load(FILE)
    net.load_state_dict(kept["net"])
    with torch.no_grad():
        acc = (net(x[240:]).argmax(1) == y[240:]).float().mean()
    if rank == 0:
        print(f"kept epoch {kept['epoch']}, test accuracy {acc:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29621").items():
        os.environ.setdefault(k, v)
    main()
