"""Binary classifier; predictions of all processes are gathered for ROC AUC on the first process."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Cross(nn.Module):
    """one cross layer and a small deep part"""

    def __init__(self, d):
        super().__init__()
        self.w = nn.Linear(d, d)
        self.deep = nn.Sequential(nn.Linear(d, 32), nn.PReLU(), nn.Linear(32, 16))
        self.out = nn.Linear(d + 16, 1)

    def forward(self, x):
        return self.out(torch.cat([x * self.w(x) + x, self.deep(x)], 1)).squeeze(1)


@torch.no_grad()
def evaluate(model, data, batch):
    model.eval()
    world = dist.get_world_size()
    sampler = DistributedSampler(data, shuffle=False)
    scores, labels = [], []
    for x, y in DataLoader(data, batch, sampler=sampler):
        s = model(x)
        gs = [torch.empty_like(s) for _ in range(world)]
        gy = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(gs, s)
        dist.all_gather(gy, y)
        scores.append(torch.stack(gs, 1).flatten())
        labels.append(torch.stack(gy, 1).flatten())
    model.train()
    return torch.cat(scores)[:len(data)], torch.cat(labels)[:len(data)]


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29713").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1451, 20, n_informative=8, weights=[0.8], flip_y=0.05, random_state=4)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    train, valid = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
    sampler = DistributedSampler(train, seed=7)
    loader = DataLoader(train, 60 // world, sampler=sampler)

    torch.manual_seed(20)
    model = DDP(Cross(20))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    weight = torch.tensor(((1200 - y[:1200].sum()) / y[:1200].sum()).item())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(bx), by, pos_weight=weight)
            opt.zero_grad()
            loss.backward()
            opt.step()
        s, t = evaluate(model.module, valid, 32 // world)
        if rank == 0:
            print(f"epoch {epoch} n {len(s)} auc {roc_auc_score(t, s):.5f} ap {average_precision_score(t, s):.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
