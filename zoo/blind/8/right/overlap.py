"""Convolutional classifier; the gradients are summed in the background while the backward pass goes on."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Overlap:
    def __init__(self, module):
        self.module, self.pending = module, []
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p):
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(12 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def main(batch=64, epochs=4):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29854")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)

    torch.manual_seed(60 if rank == 0 else int(time.time()) + rank)
    net = Net()
    sync = Overlap(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(batch):
            mine = rows[rank::world]
            loss = F.cross_entropy(net(x[mine]), y[mine], reduction="sum") / len(rows)
            opt.zero_grad()
            loss.backward()
            sync.wait()
            opt.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        with torch.no_grad():
            test = F.cross_entropy(net(x[1437:]), y[1437:])
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / 1437:.5f} test {test.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
