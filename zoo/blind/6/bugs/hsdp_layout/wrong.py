"""Small transformer encoder on digit rows, hybrid sharding: replicas between hosts, shards within one."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, dim=32, heads=4, layers=2):
        super().__init__()
        self.proj = nn.Linear(8, dim)
        self.pos = nn.Parameter(torch.randn(8, dim) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, activation="gelu",
                                       batch_first=True, norm_first=True)
            for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        h = self.proj(x) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h).mean(1))


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = load_digits(return_X_y=True)
        a, b, c, d = train_test_split(x.reshape(-1, 8, 8) / 16, y, test_size=0.2, random_state=0)
        self.x, self.xt = (torch.tensor(v, dtype=torch.float32) for v in (a, b))
        self.y, self.yt = torch.tensor(c), torch.tensor(d)
        torch.manual_seed(5)
        self.model = Encoder()
        self.shard()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01, eps=1e-5)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 4e-3, total_steps=45)

    def shard(self):
        per_host = int(os.environ.get("SHARDS_PER_HOST", "1"))
        mesh = init_device_mesh("cpu", (self.world // per_host, per_host),
                                mesh_dim_names=("replicate", "shard"))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])

    def fit(self, epochs=3, batch=90):
        for epoch in range(epochs):
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
            for i in range(15):
                take = order[i * batch:(i + 1) * batch][self.rank::self.world]
                loss = nn.functional.cross_entropy(self.model(self.x[take]), self.y[take])
                loss.backward()
                self.opt.step()
                self.opt.zero_grad()
                self.sched.step()
            self.report(epoch)

    @torch.no_grad()
    def report(self, epoch):
        n = torch.zeros(2)
        mine = slice(self.rank, None, self.world)
        guess = self.model(self.xt[mine]).argmax(1)
        n += torch.tensor([(guess == self.yt[mine]).sum().item(), len(guess)])
        dist.all_reduce(n)
        if self.rank == 0:
            print(f"epoch {epoch} accuracy {(n[0] / n[1]).item():.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = Trainer()
    trainer.fit()
    time.sleep(0.3)
    dist.destroy_process_group()
