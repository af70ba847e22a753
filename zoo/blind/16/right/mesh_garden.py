"""Hybrid sharding with accumulation, a curriculum of lengths, token-weighted loss and a restart.

The loss is summed over tokens, divided by the tokens of the whole step, and gradients are summed.
"""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

WIDTH, VOCAB, BATCH, MICRO, STEPS, STOP = 24, 15, 24, 2, 12, 5


class Gated(nn.Module):
    """A token mixer by a running mean, then a gated unit."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        past = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype).view(1, -1, 1)
        h = self.mix(torch.cat([h, past], -1))
        return x + torch.sigmoid(self.gate(h)) * self.value(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Gated() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, targets):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


def lesson(step):
    """Running sums modulo the vocabulary; sentences grow with the step, and differ in length."""
    g = torch.Generator().manual_seed(300 + step)
    longest = 6 + step // 2
    ids = torch.randint(0, VOCAB, (BATCH, longest), generator=g)
    lengths = torch.randint(3, longest + 1, (BATCH,), generator=g)
    targets = (ids + ids.roll(1, 1)) % VOCAB
    targets[:, 0] = -100
    targets[torch.arange(longest) >= lengths[:, None]] = -100
    return ids, targets


def build(mesh):
    torch.manual_seed(44)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model, torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.1)


def train(model, opt, first, last, rank, world):
    for step in range(first, last):
        ids, targets = lesson(step)
        tokens = (targets != -100).sum()
        mine = torch.arange(BATCH)[rank::world].chunk(MICRO)
        total = torch.zeros(())
        for m, rows in enumerate(mine):
            model.set_requires_gradient_sync(m == MICRO - 1)
            loss = model(ids[rows], targets[rows]) / tokens
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        for group in opt.param_groups:
            group["lr"] = 6e-3 * (1 - step / STEPS)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1}: tokens {tokens} loss {total:.6f} gradient {norm:.6f}")


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = 2 if world % 2 == 0 and world > 2 else 1
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("replicate", "shard"))
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)

    model, opt = build(mesh)
    train(model, opt, 0, STOP, rank, world)
    weights, moments = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=box[0])

    model, opt = build(mesh)
    weights, moments = get_state_dict(model, opt)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=box[0])
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=moments)
    train(model, opt, STOP, STEPS, rank, world)

    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
