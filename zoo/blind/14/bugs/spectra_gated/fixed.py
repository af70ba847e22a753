"""Concentrations of four substances from absorption spectra, with gated layers split over processes (DTensor).

Hidden units of the gated layers are spread over a mesh, everything else is replicated; every process sees the whole
batch. The gated products are written on local tensors. Runs as `python FILE` and under torchrun.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

BANDS, SUBSTANCES = 40, 4
WIDTH, HIDDEN = 24, 48
BATCH, STEPS = 32, 40


def measure(count, seed):
    """Mixtures of four known spectra with saturation and noise."""
    basis = torch.Generator().manual_seed(99)
    centre = BANDS * torch.rand(SUBSTANCES, 2, generator=basis)
    axis = torch.arange(BANDS, dtype=torch.float32)
    lines = torch.exp(-((axis - centre[..., None]) / 3) ** 2).sum(1)
    g = torch.Generator().manual_seed(seed)
    amount = torch.rand(count, SUBSTANCES, generator=g)
    light = 1 - torch.exp(-2 * amount @ lines)
    return light + 0.02 * torch.randn(count, BANDS, generator=g), amount


class GatedLayer(nn.Module):
    """Gated unit whose hidden dimension is cut over the mesh."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

        def weight(rows, columns, placement):
            full = torch.randn(rows, columns) / columns ** 0.5
            return nn.Parameter(distribute_tensor(full, mesh, [placement]))

        self.gate = weight(HIDDEN, WIDTH, Shard(0))
        self.up = weight(HIDDEN, WIDTH, Shard(0))
        self.down = weight(WIDTH, HIDDEN, Shard(1))

    def forward(self, x):
        x = x.to_local(grad_placements=[Partial()])
        gate, up, down = self.gate.to_local(), self.up.to_local(), self.down.to_local()
        part = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return DTensor.from_local(part, self.mesh, [Partial()]).redistribute(placements=[Replicate()])


class Reader(nn.Module):
    def __init__(self, mesh, depth=2):
        super().__init__()
        self.first = nn.Linear(BANDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.gated = nn.ModuleList(GatedLayer(mesh) for _ in range(depth))
        self.last = nn.Linear(WIDTH, SUBSTANCES)

    def forward(self, spectrum):
        h = self.first(spectrum)
        for norm, gated in zip(self.norms, self.gated):
            h = h + gated(norm(h))
        return self.last(h)


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29615")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    torch.manual_seed(21)
    model = distribute_module(Reader(mesh), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    x, y = measure(512, seed=3)
    x_test, y_test = measure(128, seed=4)
    picks = torch.Generator().manual_seed(8)

    def predict(spectrum):
        whole = DTensor.from_local(spectrum, mesh, [Replicate()], run_check=False)
        return model(whole).to_local()

    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=picks)
        loss = F.mse_loss(predict(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                error = (predict(x_test) - y_test).abs().mean()
            if rank == 0:
                print(f"step {step:3d}  loss {loss.item():.5f}  test error {error.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
