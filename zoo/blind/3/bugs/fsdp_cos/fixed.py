"""Small patch transformer with a cosine classifier, sharded with fully_shard."""
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.out(a)
        return x + self.mlp(self.n2(x))


class PatchNet(nn.Module):
    def __init__(self, dim=32, depth=2, classes=10):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.classes = nn.Linear(dim, classes, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, img):
        p = F.unfold(img, 2, stride=2).transpose(1, 2)
        h = self.embed(p) + self.pos
        for blk in self.blocks:
            h = blk(h)
        h = F.normalize(self.norm(h).mean(1), dim=-1)
        return self.logit_scale.exp() * self.classes(h)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(5)

    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(d.target)
    train = TensorDataset(x[:1280], y[:1280])
    sampler = DistributedSampler(train, shuffle=True, seed=8)
    loader = DataLoader(train, batch_size=80 // world, sampler=sampler)

    model = PatchNet()
    # fully_shard takes no 0-dim parameters
    keep = {model.logit_scale}
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=keep)

    sharded = [p for p in model.parameters() if p not in keep]
    opt = torch.optim.AdamW([
        {"params": sharded, "weight_decay": 0.05},
        {"params": list(keep), "weight_decay": 0.0, "lr": 5e-2},
    ], lr=8e-3)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, (xb, yb) in enumerate(loader):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            for p in keep:
                dist.all_reduce(p.grad)
                p.grad.div_(world)
            opt.step()
            opt.zero_grad()
            if step % 4 == 3:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"epoch {epoch} step {step + 1} loss {shown.item() / world:.4f}", flush=True)

        model.eval()
        with torch.no_grad():
            hits = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch} accuracy {hits:.4f} scale {model.logit_scale.exp().item():.3f}", flush=True)

    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
