"""Two-stage fine-tuning: head first, then the last block with smaller rates."""
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = int(os.environ.get("BATCH", 24))


class Backbone(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU())
        self.block = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, x):
        h = self.stem(x)
        return h + self.block(h)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 10))
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def pca_backbone(x, path):
    net = Backbone()
    mu = x.mean(0)
    v = torch.from_numpy(np.linalg.svd((x - mu).numpy(), full_matrices=False)[2][:20])
    with torch.no_grad():
        net.stem[0].weight.copy_(torch.cat([v, -v]))
        net.stem[0].bias.copy_(-net.stem[0].weight @ mu)
        h = net.stem[0](x)
        net.stem[1].running_mean.copy_(h.mean(0))
        net.stem[1].running_var.copy_(h.var(0))
    torch.save(net.state_dict(), path)


def run_epochs(model, opt, loader, epochs, first):
    for e in range(first, first + epochs):
        loader.sampler.set_epoch(e)
        model.train()
        tot = torch.zeros(3, dtype=torch.float64)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(tot)
        if dist.get_rank() == 0:
            rates = ", ".join(f"{g['lr']:.4g}" for g in opt.param_groups)
            print(f"epoch {e} train loss {tot[0] / tot[2]:.4f} acc {tot[1] / tot[2]:.4f} rates [{rates}]")


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
X, Y = load_digits(return_X_y=True)
X, Y = torch.tensor(X, dtype=torch.float32) / 16, torch.tensor(Y)
train = TensorDataset(X[:1248], Y[:1248])
loader = DataLoader(train, BATCH, sampler=DistributedSampler(train, seed=9), drop_last=True)

model = Classifier()
if rank == 0:
    path = os.path.join(tempfile.gettempdir(), "pca_backbone.pt")
    torch.manual_seed(4)
    pca_backbone(X[:1248], path)
    model.backbone.load_state_dict(torch.load(path))
    for m in model.head.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()

ddp = DDP(model)
opt = torch.optim.AdamW(model.head.parameters(), lr=5e-3)
run_epochs(ddp, opt, loader, 1, first=0)

del ddp
model.backbone.block.requires_grad_(True)
ddp = DDP(model)
opt.param_groups[0]["lr"] = 2e-3
layers = list(model.backbone.block.parameters())
opt.add_param_group({"params": [p for p in layers if p.ndim > 1], "lr": 1e-3})
opt.add_param_group({"params": [p for p in layers if p.ndim == 1], "lr": 1e-3, "weight_decay": 0.0})
run_epochs(ddp, opt, loader, 1, first=1)

model.eval()
with torch.no_grad():
    xs, ys = X[1248:][rank::world], Y[1248:][rank::world]
    hit = torch.tensor([(model(xs).argmax(1) == ys).sum(), len(ys)])
dist.all_reduce(hit)
if rank == 0:
    print(f"test accuracy {hit[0] / hit[1]:.4f}")
    torch.save(model.state_dict(), os.path.join(tempfile.gettempdir(), "finetuned.pt"))
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
