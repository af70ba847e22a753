import os
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29818")


class Layer(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out)

    def forward(self, x):
        return torch.tanh(self.lin(x))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Layer(10, 32)
        self.two = Layer(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.two(self.one(x))).squeeze(1)


def groups(model, decay):
    """Weights decay, biases do not."""
    weights, others = [], []
    for name, p in model.named_parameters():
        (weights if p.ndim > 1 else others).append(p)
    return [{"params": weights, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_diabetes(return_X_y=True, scaled=True)
    x = torch.tensor(x * 20, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    xt, yt, x, y = x[400:], y[400:], x[:400], y[:400]
    torch.manual_seed(23)
    model = FSDP(Regressor(), auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True,
                 device_id=torch.device("cpu"))
    opt = torch.optim.AdamW(groups(model, decay=0.5), lr=0.01)
    for epoch in range(10):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(80):
            mine = rows[rank::world]
            loss = F.mse_loss(model(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(mine)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  train {total.item() / len(x):.5f}", flush=True)
    with torch.no_grad():
        test = F.mse_loss(model(xt), yt)
    if rank == 0:
        print(f"test {test.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
