"""One trunk, three binary questions about a digit: odd? above four? prime? Every row asks one of them."""
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

QUESTIONS = ("odd", "large", "prime")


class DigitQuestions(Dataset):
    def __init__(self):
        d = load_digits()
        self.x = torch.tensor(d.data, dtype=torch.float32) / 16
        t = torch.tensor(d.target)
        self.answers = torch.stack([t % 2 == 1, t > 4, (t == 2) | (t == 3) | (t == 5) | (t == 7)], 1).float()
        self.task = torch.tensor([(i * 7 + i // 5) % 3 for i in range(len(t))])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.task[i], self.answers[i, self.task[i]]


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.heads = nn.Linear(24, len(QUESTIONS))

    def forward(self, x, task):
        return self.heads(self.trunk(x)).gather(1, task[:, None]).squeeze(1)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = defaultdict(lambda: torch.zeros(2))
    for x, task, y in loader:
        hit = ((model(x, task) > 0).float() == y).float()
        for t in dict.fromkeys(task.tolist()):
            rows = task == t
            sums[QUESTIONS[t]] += torch.stack([hit[rows].sum(), rows.sum().float()])
    for name in sorted(sums):
        dist.all_reduce(sums[name])
    model.train()
    return {name: (pair[0] / pair[1]).item() for name, pair in sums.items()}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    data = DigitQuestions()
    train, val = Subset(data, range(1200)), Subset(data, range(1200, 1680))
    sampler = DistributedSampler(train, shuffle=True, seed=21)
    loader = DataLoader(train, batch_size=96 // world, sampler=sampler)
    val_loader = DataLoader(val, batch_size=60 // world, sampler=DistributedSampler(val, shuffle=False))

    model = DistributedDataParallel(MultiTask())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, task, y in loader:
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(x, task), y).backward()
            opt.step()
        scores = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{q} {scores[q]:.4f}" for q in QUESTIONS), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
