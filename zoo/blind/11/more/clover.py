# A communication hook instead of DDP's average: the processes have batches of unequal size
import os
import time
import numpy as np
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_iris, load_wine

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30128")


class Weights:
    """hook state: the share of this process in the current global batch"""

    def __init__(self, group=None):
        self.group, self.share = group, None
        self.bytes = 0


def weighted_mean_hook(state: Weights, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buf = bucket.buffer()
    state.bytes += buf.numel() * buf.element_size()
    buf.mul_(state.share)
    fut = dist.all_reduce(buf, group=state.group, async_op=True).get_future()
    return fut.then(lambda f: f.value()[0])


class UnevenLoader:
    """50 samples in a batch whatever the number of processes; np.array_split makes the pieces.
    The last batch of an epoch is what is left."""

    def __init__(self, x, y, batch=50):
        self.x, self.y, self.batch = x, y, batch
        self.rng = np.random.RandomState(11)

    def __iter__(self):
        order = self.rng.permutation(len(self.x))
        for i in range(0, len(order), self.batch):
            b = order[i:i + self.batch]
            mine = np.array_split(b, dist.get_world_size())[dist.get_rank()]
            yield self.x[mine], self.y[mine], len(mine) / len(b)


class Highway(nn.Module):
    def __init__(self, d, c, width=40, depth=3):
        super().__init__()
        self.inp = nn.Linear(d, width)
        self.h = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.t = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        for t in self.t:
            nn.init.constant_(t.bias, -1.0)
        self.out = nn.Linear(width, c)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for h, t in zip(self.h, self.t):
            gate = torch.sigmoid(t(x))
            x = gate * torch.relu(h(x)) + (1 - gate) * x
        return self.out(x)


def two_data_sets():
    """wine and iris side by side: six classes"""
    xw, yw = load_wine(return_X_y=True)
    xi, yi = load_iris(return_X_y=True)
    xw, xi = (xw - xw.mean(0)) / xw.std(0), (xi - xi.mean(0)) / xi.std(0)
    x = np.zeros((len(xw) + len(xi), xw.shape[1] + xi.shape[1]), dtype=np.float32)
    x[:len(xw), :xw.shape[1]], x[len(xw):, xw.shape[1]:] = xw, xi
    x += 0.3 * np.random.RandomState(0).randn(*x.shape).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(np.concatenate([yw, yi + 3]))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, y = two_data_sets()
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    train, test = perm[:263], perm[263:]
    torch.manual_seed(rank * 31 + 7)
    model = DDP(Highway(x.shape[1], 6), bucket_cap_mb=0.01)
    state = Weights()
    model.register_comm_hook(state, weighted_mean_hook)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, eps=1e-5)
    loader = UnevenLoader(x[train], y[train])
    for epoch in range(12):
        meter = torch.zeros(1)
        for xb, yb, share in loader:
            state.share = share
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)  # local mean, weighted in the hook
            loss.backward()
            optimizer.step()
            meter += loss.detach() * share
        dist.all_reduce(meter)
        if rank == 0 and epoch % 3 == 2:
            with torch.no_grad():
                acc = (model.module(x[test]).argmax(1) == y[test]).float().mean()
            print(f"epoch {epoch} loss {meter.item() / 6:.5f} acc {acc:.4f} reduced {state.bytes // 1024} KiB")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
