import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

BATCH = 32
EPOCHS = 2
LR = 0.15
GAMMA = 0.5


def batches_for(epoch, n, rank, world, batch):
    """Whole batches are dealt out like cards; when they do not divide, low ranks get one more."""
    order = np.random.default_rng(100 + epoch).permutation(n)
    order = order[: n // batch * batch].reshape(-1, batch)
    return order[rank::world]


def main(batch=BATCH):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    X, y = load_digits(return_X_y=True)
    X = torch.from_numpy(X).float().div_(16)
    y = torch.from_numpy(y)
    n_train = 45 * 32

    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 10))
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=GAMMA)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        own = batches_for(epoch, n_train, rank, world, batch)
        loss_sum = 0.0
        with model.join(divide_by_initial_world_size=False):
            for idx in own:
                idx = torch.as_tensor(idx)
                opt.zero_grad()
                loss = criterion(model(X[idx]), y[idx])
                loss.backward()
                opt.step()
                loss_sum += loss.item()
        sched.step()

        with torch.no_grad():
            tx, ty = X[n_train + rank::world], y[n_train + rank::world]
            right = (net(tx).argmax(1) == ty).sum().item()
        agg = torch.tensor([loss_sum, len(own), right, len(ty)], dtype=torch.float64)
        dist.all_reduce(agg)
        print(f"rank {rank} epoch {epoch}: {len(own)} batches here, {int(agg[1])} in all")
        if rank == 0:
            print(f"epoch {epoch}: loss {agg[0] / agg[1]:.5f} accuracy {agg[2] / agg[3]:.4f} ({int(agg[3])} samples)")
            torch.save(net.state_dict(), "/tmp/join_tail.pt")

    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
