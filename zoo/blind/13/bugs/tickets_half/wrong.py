"""Route support tickets (bags of words); features in half precision, dynamic loss scale, sharded optimizer."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class LossScale:
    def __init__(self, start=2.0 ** 19, interval=3):
        self.value, self.interval, self.good = start, interval, 0

    def update(self, overflow):
        if overflow:
            self.value, self.good = self.value / 2, 0
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2, 0


class Router(nn.Module):
    def __init__(self, words, queues, width=32):
        super().__init__()
        self.features = nn.Linear(words, width)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.out = nn.Linear(width, queues)

    def forward(self, x):
        h = torch.tanh(self.features(x)).half().double()
        return self.out(torch.relu(self.two(torch.relu(self.one(h)))))


def tickets(count, words, queues, seed):
    g = torch.Generator().manual_seed(seed)
    topic = torch.softmax(1.5 * torch.randn(queues, words, generator=g), dim=1)
    y = torch.randint(queues, (count,), generator=g)
    x = torch.zeros(count, words)
    for i, k in enumerate(y.tolist()):
        drawn = torch.multinomial(topic[k], 12, replacement=True, generator=g)
        x[i] = torch.bincount(drawn, minlength=words)
    return x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    x, y = tickets(512, words=60, queues=6, seed=12)
    model = Router(60, 6)
    params = list(model.parameters())
    each = -(-len(params) // world)
    owner = [i // each for i in range(len(params))]
    own = [p for p, o in zip(params, owner) if o == rank]
    opt = torch.optim.Adam(own, lr=args.lr, eps=1e-6)
    scale = LossScale()
    g = torch.Generator().manual_seed(5)
    skipped, total = 0, torch.zeros(())

    for step in range(args.steps):
        rows = torch.randint(len(x), (args.batch,), generator=g)[rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / args.batch
        model.zero_grad()
        (loss * scale.value).backward()
        for p, o in zip(params, owner):
            dist.reduce(p.grad, dst=o)
        overflow = torch.tensor(float(any(not p.grad.isfinite().all() for p in own)))
        if overflow:
            skipped += 1
        else:
            for p in own:
                p.grad /= scale.value
            opt.step()
        scale.update(bool(overflow))
        for p, o in zip(params, owner):
            dist.broadcast(p.data, src=o)
        total += loss.detach()
        if step % 8 == 7:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total / 8:.5f} skipped {skipped} scale 2^{torch.tensor(scale.value).log2():.0f}")
            total = torch.zeros(())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
