"""The first rank alone validates and decides about stopping and about going back to the best weights."""
import argparse
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman2
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Decider:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.weights = patience, float("inf"), 0, None

    def judge(self, net, x, y):
        with torch.no_grad():
            error = nn.functional.mse_loss(net(x), y).item()
        if error < 0.97 * self.best:
            self.best, self.bad = error, 0
            self.weights = {k: v.clone() for k, v in net.state_dict().items()}
        else:
            self.bad += 1
        print(f"validation {error:.5f}, best {self.best:.5f}")
        return self.bad >= self.patience


def data():
    x, y = make_friedman2(900, noise=60.0, random_state=3)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).unsqueeze(1)


def main(argv):
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--per-round", type=int, default=4)
    ap.add_argument("--batch", type=int, default=100)
    ap.add_argument("--patience", type=int, default=2)
    args = ap.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data()
    torch.manual_seed(13)
    net = nn.Sequential(nn.Linear(4, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    ddp = DistributedDataParallel(net)
    opt = torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-4)
    decider = Decider(args.patience) if rank == 0 else None
    order = torch.Generator().manual_seed(88)
    for round_ in range(args.rounds):
        for _ in range(args.per_round):
            rows = torch.randint(700, (args.batch,), generator=order)[rank::world]
            loss = nn.functional.mse_loss(ddp(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        stop = torch.zeros(1)
        if rank == 0:
            stop.fill_(float(decider.judge(net, x[700:], y[700:])))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    if rank == 0:
        print(f"stopped after round {round_ + 1}")
        net.load_state_dict(decider.weights)
    for t in net.state_dict().values():
        dist.broadcast(t, src=0)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
