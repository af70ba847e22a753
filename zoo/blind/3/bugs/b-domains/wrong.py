# Group-robust training: domains with a higher loss get a larger weight (group DRO style).
import json
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)

CFG = dict(epochs=3, global_batch=64, lr=0.1, momentum=0.9, eta=0.8, window=4, seed=17)
DOMAINS = ["clean", "faint", "grainy", "mirrored"]


class DomainDigits(Dataset):
    def __init__(self, lo, hi, seed):
        d = load_digits()
        g = torch.Generator().manual_seed(seed)
        img = torch.tensor(d.images[lo:hi], dtype=torch.float32) / 16.0
        pick = torch.multinomial(torch.tensor([0.4, 0.25, 0.2, 0.15]), len(img), replacement=True, generator=g)
        noise = torch.randn(img.shape, generator=g)
        img = torch.where((pick == 1)[:, None, None], 0.3 * img, img)
        img = torch.where((pick == 2)[:, None, None], img + 0.4 * noise, img)
        img = torch.where((pick == 3)[:, None, None], img.flip(2), img)
        self.x, self.y = img.flatten(1), torch.tensor(d.target[lo:hi])
        self.domain = [DOMAINS[i] for i in pick.tolist()]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], self.domain[i]


class DomainMeter:
    """Sum and count per domain since the last reset."""

    def __init__(self):
        self.sums = {}

    def add(self, domains, values):
        for name, v in zip(domains, values.tolist()):
            cell = self.sums.setdefault(name, torch.zeros(2))
            cell += torch.tensor([v, 1.0])

    def reduce(self):
        for name in self.sums:
            dist.all_reduce(self.sums[name])
        return {name: (s[0] / s[1]).item() for name, s in self.sums.items()}


class Weights:
    def __init__(self, eta):
        self.q = {name: 1.0 / len(DOMAINS) for name in DOMAINS}
        self.eta = eta

    def update(self, losses):
        for name, value in losses.items():
            self.q[name] *= float(torch.exp(torch.tensor(self.eta * value)))
        z = sum(self.q.values())
        self.q = {k: v / z for k, v in self.q.items()}

    def of(self, domains):
        return torch.tensor([self.q[name] * len(DOMAINS) for name in domains])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(CFG["seed"])

    train, test = DomainDigits(0, 1280, 1), DomainDigits(1280, 1680, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=CFG["seed"])
    loader = DataLoader(train, batch_size=CFG["global_batch"] // world, sampler=sampler, drop_last=True)
    test_loader = DataLoader(torch.utils.data.Subset(test, range(rank, len(test), world)), batch_size=100)

    net = DDP(nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 10)))
    opt = torch.optim.SGD(net.parameters(), lr=CFG["lr"], momentum=CFG["momentum"])
    weights = Weights(CFG["eta"])
    meter, step = DomainMeter(), 0

    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        for x, y, domains in loader:
            per_sample = F.cross_entropy(net(x), y, reduction="none")
            loss = (weights.of(domains) * per_sample).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            meter.add(domains, per_sample.detach())
            if step % CFG["window"] == 0:
                weights.update(meter.reduce())
                meter = DomainMeter()

        scores = DomainMeter()
        with torch.no_grad():
            for x, y, domains in test_loader:
                scores.add(domains, (net.module(x).argmax(1) == y).float())
        acc = scores.reduce()
        if rank == 0:
            line = "  ".join(f"{k} {acc[k]:.3f} (q {weights.q[k]:.3f})" for k in DOMAINS)
            print(f"epoch {epoch}  {line}  worst {min(acc.values()):.3f}", flush=True)

    if rank == 0:
        torch.save({"model": net.module.state_dict(), "q": weights.q}, "domains.pt")
        with open("domains.json", "w") as f:
            json.dump({"accuracy": acc, "worst": min(acc.values())}, f, indent=1, sort_keys=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
