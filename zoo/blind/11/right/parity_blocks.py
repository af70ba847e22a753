import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29841")

BITS, BATCH = 9, 64


def build(rank, job):
    torch.manual_seed(1000 * job + rank)
    model = nn.Sequential(nn.Linear(BITS, 35), nn.Tanh(), nn.Linear(35, 21), nn.Tanh(), nn.Linear(21, 3))
    if job == 1:
        with torch.no_grad():
            for p in model.parameters():
                dist.broadcast(p, 0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-6)
    return model, opt


def fit(model, opt, first, last):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        g = torch.Generator().manual_seed(step)
        bits = torch.randint(2, (BATCH, BITS), generator=g)[rank::world]
        label = bits[:, :4].sum(1).clamp(1, 3) - 1
        loss = F.cross_entropy(model(bits.float() - 0.5), label)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        opt.step()
        if step % 20 == 19:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item():.5f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    file = os.path.join(folder[0], "parity.pt")
    model, opt = build(rank, job=1)
    fit(model, opt, 0, 50)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, opt, options=whole)
    if rank == 0:
        torch.save((weights, states), file)
    dist.barrier()

    model, opt = build(rank, job=2)
    weights, states = torch.load(file)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states, options=whole)
    fit(model, opt, 50, 100)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
