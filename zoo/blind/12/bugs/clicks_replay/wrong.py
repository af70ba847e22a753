"""Click prediction over a stream of events. The job is stopped in the middle and taken up again from its file."""
import itertools
import os
import random
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn

EVENTS, BATCH, USERS, ADS = 8192, 64, 60, 40


def all_events():
    rng = random.Random(6)
    taste = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(USERS)]
    kind = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(ADS)]
    for n in range(EVENTS):
        u, a = rng.randrange(USERS), rng.randrange(ADS)
        drift = 2.0 * n / EVENTS - 1.0
        s = sum(p * q for p, q in zip(taste[u], kind[a])) + drift
        yield u, a, float(s + rng.gauss(0, 0.5) > 0)


class EventReader:
    def __init__(self, rank, world):
        self.rank, self.world, self.seen = rank, world, 0

    def restore(self, seen):
        self.seen = seen

    def __iter__(self):
        mine = itertools.islice(all_events(), self.rank, None, self.world)
        mine = itertools.islice(mine, self.seen, None)
        while True:
            chunk = list(itertools.islice(mine, BATCH // self.world))
            if len(chunk) < BATCH // self.world:
                return
            self.seen += BATCH
            u, a, c = zip(*chunk)
            yield torch.tensor(u), torch.tensor(a), torch.tensor(c)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.ad = nn.Embedding(USERS, 8), nn.Embedding(ADS, 8)
        self.tower = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, u, a):
        return self.tower(torch.cat([self.user(u), self.ad(a)], 1)).squeeze(1)


def job(path, steps, resume):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Model()
    opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    reader = EventReader(rank, world)
    if resume:
        state = torch.load(path)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        reader.restore(state["seen"])
    total = torch.zeros(())
    for u, a, c in itertools.islice(reader, steps):
        loss = nn.functional.binary_cross_entropy_with_logits(net(u, a), c)
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "seen": reader.seen}, path)
        print(f"{'second' if resume else 'first'} job: {total.item() / world / steps:.5f}")
    dist.barrier()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "state.pt")
    job(path, 20, resume=False)
    job(path, 20, resume=True)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
