"""Two-tower retrieval: match the upper half of a digit to its lower half. InfoNCE with negatives from every process."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
BATCH, EPOCHS, DIM = 96, 3, 24


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, DIM))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.top, self.bottom = Tower(), Tower()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        return self.top(a), self.bottom(b), self.log_scale.exp()


def info_nce(za, zb, scale):
    all_a = torch.cat(dnn.all_gather(za))
    all_b = torch.cat(dnn.all_gather(zb))
    target = torch.arange(len(za)) + dist.get_rank() * len(za)
    return 0.5 * (F.cross_entropy(scale * za @ all_b.T, target) + F.cross_entropy(scale * zb @ all_a.T, target))


@torch.no_grad()
def recall_at(model, a, b, ks=(1, 5)):
    rank, world = dist.get_rank(), dist.get_world_size()
    a, b = a.chunk(world)[rank], b.chunk(world)[rank]
    model.eval()
    query, gallery = model.module.top(a), model.module.bottom(b)
    target = torch.arange(len(query))
    order = (query @ gallery.T).argsort(dim=1, descending=True)
    hits = [(order[:, :k] == target[:, None]).any(1).sum() for k in ks]
    counts = torch.tensor([*hits, len(query)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return {f"R@{k}": (counts[i] / counts[-1]).item() for i, k in enumerate(ks)}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    pix = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    upper, lower = pix[:, :32], pix[:, 32:]
    n_train = 1344
    model = DDP(TwoTower())
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    for epoch in range(EPOCHS):
        order = torch.randperm(n_train, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            idx = batch.chunk(world)[rank]
            loss = info_nce(*model(upper[idx], lower[idx]))
            opt.zero_grad()
            loss.backward()
            opt.step()
        scores = recall_at(model, upper[n_train:n_train + 400], lower[n_train:n_train + 400])
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} " + " ".join(f"{k} {v:.4f}" for k, v in scores.items()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
