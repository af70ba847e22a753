"""FSDP2 on a two-dimensional mesh; the job stops inside an epoch, a distributed checkpoint is taken up by a fresh job."""
import os
import shutil
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")
BATCH, PER_EPOCH, STOP, END = 64, 20, 27, 46


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Job:
    """Everything that a checkpoint has to hold, with the interface that dcp asks for."""

    def __init__(self, mesh, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(64, 48), Mixer(48), Mixer(48), nn.LayerNorm(48), nn.Linear(48, 10))
        for p in self.net.parameters():
            dist.broadcast(p.data, 0)
        for layer in self.net:
            if isinstance(layer, Mixer):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3, weight_decay=0.05, eps=1e-6)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, END, eta_min=1e-4)
        self.step = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = int(state["step"])

    def rows(self, rank, world):
        """This process's rows of the batch number self.step."""
        epoch, place = divmod(self.step, PER_EPOCH)
        order = torch.randperm(PER_EPOCH * BATCH, generator=torch.Generator().manual_seed(70 + epoch))
        return order[place * BATCH:][:BATCH].view(world, -1)[rank]

    def run(self, x, y, until):
        rank, world = dist.get_rank(), dist.get_world_size()
        while self.step < until:
            mine = self.rows(rank, world)
            loss = F.cross_entropy(self.net(x[mine]), y[mine], label_smoothing=0.1)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            if self.step % 9 == 0:
                mean = loss.detach() / world
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {self.step} loss {mean.item():.5f} lr {self.schedule.get_last_lr()[0]:.6f}", flush=True)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/init", rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = 2 if world > 1 else 1
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)

    first = Job(mesh, seed=rank)
    first.run(x, y, STOP)
    dcp.save({"job": first}, checkpoint_id=os.path.join(folder[0], "step"))
    del first
    second = Job(mesh, seed=1000 + rank)
    dcp.load({"job": second}, checkpoint_id=os.path.join(folder[0], "step"))
    second.run(x, y, END)

    second.net.eval()
    with torch.no_grad():
        held = torch.arange(PER_EPOCH * BATCH, len(x))[rank::world]
        longest = -(-(len(x) - PER_EPOCH * BATCH) // world)
        pad = torch.cat([held, held[:1].expand(longest - len(held))])
        hits = (second.net(x[pad]).argmax(1) == y[pad])[: len(held)].sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"held-out {hits.item()} of {len(x) - PER_EPOCH * BATCH}", flush=True)
        shutil.rmtree(folder[0])
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
