import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# Hybrid sharding: shards inside a "node", replicas across nodes. LOCAL_SHARDS processes make up one shard group.
LOCAL_SHARDS = int(os.environ.get("LOCAL_SHARDS", 1))
MICRO = int(os.environ.get("MICRO", 16))
ACCUM = 2
STEPS = 24

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world // LOCAL_SHARDS, LOCAL_SHARDS), mesh_dim_names=("replicate", "shard"))


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Regressor(nn.Module):
    def __init__(self, n_in=10, dim=40, depth=3):
        super().__init__()
        self.stem = nn.Linear(n_in, dim)
        self.layers = nn.Sequential(*[Residual(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(self.layers(self.stem(x)))


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, ((y - 14.4) / 4.9).unsqueeze(1)


x, y = friedman(1600, 0)
xv, yv = friedman(333, 1)

torch.manual_seed(0)
with torch.device("meta"):
    model = Regressor()
for layer in model.layers:
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
model.to_empty(device="cpu")

# weights are drawn once, on every process with the same seed, and cut into shards afterwards
torch.manual_seed(0)
full = Regressor().state_dict()
set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))

opt = torch.optim.Adam(model.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
order = torch.Generator().manual_seed(11)
perm = torch.randperm(len(x), generator=order)
cursor = 0
chunk = MICRO * world

for step in range(STEPS):
    logged = torch.zeros(())
    for micro in range(ACCUM):
        if cursor + chunk > len(perm):
            perm, cursor = torch.randperm(len(x), generator=order), 0
        ids = perm[cursor:cursor + chunk][rank::world]
        cursor += chunk
        model.set_requires_gradient_sync(micro == ACCUM - 1)
        loss = nn.functional.smooth_l1_loss(model(x[ids]), y[ids]) / ACCUM
        loss.backward()
        logged += loss.detach()
    opt.step()
    opt.zero_grad()
    sched.step()
    if step % 6 == 5:
        dist.all_reduce(logged)
        if rank == 0:
            print(f"step {step + 1:3d} loss {logged.item() / world:.4f} lr {sched.get_last_lr()[0]:.5f}", flush=True)

model.eval()
with torch.no_grad():
    err = (model(xv[rank::world]) - yv[rank::world]).square().sum()
dist.all_reduce(err)
if rank == 0:
    print(f"val rmse {(err.item() / len(xv)) ** 0.5:.4f}")
dist.destroy_process_group()
