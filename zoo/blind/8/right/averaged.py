import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes

BATCH, EPOCHS = 40, 12


def setup():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29855")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def make_net():
    torch.manual_seed(111)
    return nn.Sequential(nn.Linear(10, 32), nn.Softplus(), nn.Linear(32, 16), nn.Softplus(), nn.Linear(16, 1))


@torch.no_grad()
def average_weights(net, world):
    for p in net.parameters():
        dist.all_reduce(p)
        p /= world


def batches(n, epoch, rank, world):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH):
        yield rows.chunk(world)[rank]


def main():
    rank, world = setup()
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x * 21, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    x, y, x_test, y_test = x[:400], y[:400], x[400:], y[400:]
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    for epoch in range(EPOCHS):
        for rows in batches(len(x), epoch, rank, world):
            loss = nn.functional.mse_loss(net(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            # SGD is linear in the gradient: the mean of the stepped weights is the step with the mean gradient
            average_weights(net, world)
        sched.step()
        with torch.no_grad():
            test = nn.functional.mse_loss(net(x_test), y_test)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and epoch % 2 == 1:
            print(f"epoch {epoch + 1} train {shown.item() / world:.5f} test {test.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
