import os
import torch
import torch.nn as nn
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Patches(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(4, dim)
        self.pos = nn.Parameter(torch.zeros(16, dim))

    def forward(self, img):
        p = img.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(img), 16, 4)
        return self.proj(p) + self.pos


class TinyViT(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patches = Patches(dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, img):
        h = self.patches(img)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


@torch.no_grad()
def clip_(params, limit):
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params if p.grad is not None]
    sq = torch.stack([g.square().sum() for g in grads]).sum()
    dist.all_reduce(sq)
    norm = sq.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    model = TinyViT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.06, momentum=0.9)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=8)

    digits = load_digits()
    ds = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target))
    sampler = DistributedSampler(ds, seed=2, drop_last=True)
    loader = DataLoader(ds, 128 // world, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (img, lab) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(img), lab)
            opt.zero_grad()
            loss.backward()
            clip_(params, 0.3)
            opt.step()
            sched.step()
            if i % 4 == 0:
                v = loss.detach() / world
                dist.all_reduce(v)
                if rank == 0:
                    print(epoch, i, round(v.item(), 5), f"lr {sched.get_last_lr()[0]:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}.items():
        os.environ.setdefault(k, v)
    run()
