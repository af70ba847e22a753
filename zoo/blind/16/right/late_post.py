"""Training with gradients that arrive one step late.

The average of step t is on its way while step t+1 computes; it is applied when it is there.
The lag is part of the method and is the same on any number of processes.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman1
from torch import nn

BATCH, EPOCHS, LR = 40, 4, 0.05


class Mail:
    """Two flat buffers: one is being filled, the other is travelling."""

    def __init__(self, params, world):
        self.params = list(params)
        size = sum(p.numel() for p in self.params)
        self.buffers = [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
        self.turn, self.world, self.work, self.sent = 0, world, None, False

    def collect(self):
        """Averaged gradient posted by the previous step, or False before there is one."""
        if not self.sent:
            return False
        if self.work is not None:
            self.work.wait()
        flat, at = self.buffers[1 - self.turn], 0
        for p in self.params:
            p.grad = flat[at:at + p.numel()].view_as(p) / self.world
            at += p.numel()
        self.sent = False
        return True

    def post(self, grads):
        flat = self.buffers[self.turn]
        torch.cat([g.reshape(-1) for g in grads], out=flat)
        if self.world > 1:
            self.work = dist.all_reduce(flat, async_op=True)
        self.turn, self.sent = 1 - self.turn, True


class Shuffler(torch.utils.data.Sampler):
    """This rank's share of every global batch."""

    def __init__(self, length, rank, world):
        self.length, self.rank, self.world, self.epoch = length, rank, world, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(500 + self.epoch)
        self.epoch += 1
        for batch in torch.randperm(self.length, generator=g).split(BATCH):
            yield batch[self.rank::self.world].tolist()

    def __len__(self):
        return self.length // BATCH


def main():
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if many:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if many else 0
    world = dist.get_world_size() if many else 1

    x, y = make_friedman1(520, noise=0.3, random_state=9)
    x, y = torch.tensor(x), torch.tensor(y)
    y = (y - y.mean()) / y.std()
    train = torch.utils.data.TensorDataset(x[:400], y[:400])
    sampler = Shuffler(400, rank, world)
    loader = torch.utils.data.DataLoader(train, batch_sampler=sampler)

    torch.manual_seed(31)
    net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 1)).double()
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=LR, momentum=0.8, nesterov=True)
    steps = EPOCHS * len(sampler)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, LR, total_steps=steps + 1, cycle_momentum=False)
    mail = Mail(params, world)

    def apply():
        if mail.collect():
            nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            sched.step()

    for epoch in range(EPOCHS):
        running = torch.zeros(2, dtype=torch.float64)
        for features, target in loader:
            loss = nn.functional.mse_loss(net(features).squeeze(1), target)
            grads = torch.autograd.grad(loss, params)
            apply()
            mail.post(grads)
            running += torch.stack([loss.detach() * len(target), torch.tensor(float(len(target)))])
        if many:
            dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: train {running[0] / running[1]:.10f} lr {sched.get_last_lr()[0]:.6f}")
    apply()

    if rank == 0:
        with torch.no_grad():
            test = nn.functional.mse_loss(net(x[400:]).squeeze(1), y[400:])
        print(f"test {test:.10f}")
    if many:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
