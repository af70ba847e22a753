"""Name the tone of a short recording; sharded training in two jobs with a checkpoint of whole tensors between."""
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TONES, LENGTH, BATCH, LR = 7, 50, 56, 0.05


def recordings(count, seed):
    g = torch.Generator().manual_seed(seed)
    tone = torch.randint(TONES, (count,), generator=g)
    t = torch.arange(LENGTH) / LENGTH
    pitch = (3 + 2 * tone)[:, None] * (1 + 0.03 * torch.randn(count, 1, generator=g))
    x = torch.sin(2 * math.pi * (pitch * t + torch.rand(count, 1, generator=g)))
    return x + 0.5 * torch.randn(count, LENGTH, generator=g), tone


def build(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(LENGTH, 45), nn.Tanh()),
        nn.Sequential(nn.Linear(45, 35), nn.Tanh()),
        nn.Linear(35, TONES),
    )
    for part in net:
        fully_shard(part)
    fully_shard(net)
    return net, torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def save(path, net, opt, step):
    state = {"step": step, "weights": {}, "momentum": {}}
    for name, p in net.named_parameters():
        state["weights"][name] = p.detach().full_tensor()
        state["momentum"][name] = opt.state[p]["momentum_buffer"].full_tensor()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def own_rows(full, like):
    """Rows of a whole tensor that this process holds of the sharded one."""
    rows = like.to_local().shape[0]
    return full[dist.get_rank() * rows:(dist.get_rank() + 1) * rows]


def load(path, net, opt):
    state = torch.load(path)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.to_local().copy_(own_rows(state["weights"][name], p))
            rows = own_rows(state["momentum"][name], p).clone()
            opt.state[p]["momentum_buffer"] = DTensor.from_local(
                rows, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
    return state["step"]


def train(net, opt, x, y, first, last):
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(())
    for step in range(first, last):
        rows = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach() / 5
        if step % 5 == 4:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total / world:.5f}")
            total = torch.zeros(())


def main():
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "step.pt")
    x, y = recordings(448, seed=6)
    net, opt = build(seed=1)
    train(net, opt, x, y, 0, 25)
    save(path, net, opt, 25)

    net, opt = build(seed=2)
    train(net, opt, x, y, load(path, net, opt), 45)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
