"""2-D parallel MLP-Mixer on digits: tensor parallel inside a pair, FSDP2 between pairs.

    torchrun --nproc-per-node 4 grid_mixer.py      # 2 x 2; with 2 processes 1 x 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PATCHES, PATCH, WIDTH = 16, 4, 32
BATCH, STEPS = 64, 30


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MixerLayer(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.patches, self.channels = Mlp(PATCHES, 32), Mlp(WIDTH, 64)
        self.keep = 1 - drop

    def forward(self, x, alive):
        # stochastic depth: a picture skips the layer as a whole
        gate = (alive / self.keep)[:, None, None] if self.training else 1.0
        x = x + gate * self.patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + gate * self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.layers = nn.ModuleList(MixerLayer(0.1 * k) for k in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x, alive):
        h = self.embed(x)
        for k, layer in enumerate(self.layers):
            h = layer(h, alive[:, k])
        return self.head(self.norm(h).mean(1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = min(2, world)
    mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    data_rank, data_size = mesh["data"].get_local_rank(), mesh["data"].size()

    torch.manual_seed(55)
    model = Mixer()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {
            "patches.up": ColwiseParallel(), "patches.down": RowwiseParallel(),
            "channels.up": ColwiseParallel(), "channels.down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    # parameters cut in both dimensions and those cut between pairs only do not go into one fused step
    split = [p for p in model.parameters() if p.device_mesh.ndim == 2]
    other = [p for p in model.parameters() if p.device_mesh.ndim == 1]
    opts = [torch.optim.AdamW(group, lr=4e-3, weight_decay=0.03, foreach=False) for group in (split, other)]

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, PATCH) / 8 - 1
    y = torch.tensor(y)
    train, test = torch.arange(1400), torch.arange(1400, 1797)
    per = BATCH // data_size
    draw = torch.Generator().manual_seed(66)
    for step in range(STEPS):
        rows = train[torch.randint(len(train), (BATCH,), generator=draw)]
        alive = torch.rand(BATCH, 3, generator=draw) < torch.tensor([1.0, 0.9, 0.8])
        mine = slice(data_rank * per, (data_rank + 1) * per)
        loss = F.cross_entropy(model(x[rows[mine]], alive[mine].float()), y[rows[mine]])
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if step % 6 == 5:
            value = loss.detach().clone()
            dist.all_reduce(value, group=mesh["data"].get_group())
            if rank == 0:
                print(f"step {step + 1} loss {value.item() / data_size:.4f}")

    model.eval()
    parts = test.tensor_split(data_size)
    with torch.no_grad():
        mine = parts[data_rank]
        hits = (model(x[mine], torch.ones(len(mine), 3)).argmax(1) == y[mine]).sum()
    dist.all_reduce(hits, group=mesh["data"].get_group())     # both of a pair hold the same answer
    if rank == 0:
        print(f"accuracy {hits.item() / len(test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
