"""FSDP2 from the meta device: only process 0 makes real weights, which are then handed out."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RANK", "0"); os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1"); os.environ.setdefault("MASTER_PORT", "30025")


def make():
    return nn.Sequential(
        nn.Linear(64, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 40), nn.GELU(), nn.Linear(40, 10)
    )


def sharded_model(rank):
    torch.manual_seed(1000 + rank)
    full = make().state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = make()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    return model


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    model = sharded_model(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    gen = torch.Generator().manual_seed(0)
    for step in range(50):
        rows = torch.randperm(1536, generator=gen)[:64][rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        opt.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                test = F.cross_entropy(model(x[1536:]), y[1536:]).item()
            if rank == 0:
                print(f"step {step + 1} norm {norm.item():.5f} test {test:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
