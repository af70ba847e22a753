import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_regression
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 48


def setup():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29830")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def build():
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.95, 0.99))
    return net, opt


def save(path, net, opt, step):
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)


def restore(path, net, opt):
    state = torch.load(path)
    net.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    return state["step"]


def session(path, x, y, steps, rank, world):
    """One run of the program: continue from the checkpoint if there is one."""
    torch.manual_seed(44)
    net, opt = build()
    start = 0
    if os.path.exists(path):
        start = restore(path, net, opt)
    box = [start]
    dist.broadcast_object_list(box, src=0)
    start = box[0]
    model = DDP(net)

    for step in range(start, start + steps):
        gen = torch.Generator().manual_seed(step)
        rows = torch.randint(900, (BATCH,), generator=gen)[rank::world]
        loss = nn.functional.huber_loss(model(x[rows]).squeeze(1), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 19:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.5f}")
    if rank == 0:
        save(path, net, opt, start + steps)
    dist.barrier()
    return net


def main():
    rank, world = setup()
    x, y = make_regression(n_samples=1000, n_features=20, n_informative=10, noise=5.0, random_state=3)
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor(y / y.std(), dtype=torch.float32)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "state.pt")

    for _ in range(3):
        net = session(path, x, y, 40, rank, world)

    part = slice(900 + rank * 100 // world, 900 + (rank + 1) * 100 // world)
    with torch.no_grad():
        error = nn.functional.mse_loss(net(x[part]).squeeze(1), y[part], reduction="sum")
    dist.all_reduce(error)
    if rank == 0:
        print(f"test mse {error.item() / 100:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
