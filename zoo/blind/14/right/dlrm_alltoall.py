"""DLRM for clicks: embedding tables shared out over processes, dense part under DDP.

Eight tables; process r holds tables r*8/world ... and looks up the rows of the whole
batch in them. An all-to-all turns "my tables, all rows" into "all tables, my rows".
Tables have Adagrad, the dense part AdamW. The AUC is that of all test rows.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TABLES, ROWS, DIM, DENSE, BATCH = 8, 40, 8, 5, 128


class Exchange(torch.autograd.Function):
    """(world, rows, tables, dim): block p goes to process p."""

    @staticmethod
    def forward(ctx, blocks, group):
        ctx.group = group
        out = torch.empty_like(blocks)
        dist.all_to_all_single(out, blocks.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        back = torch.empty_like(grad)
        dist.all_to_all_single(back, grad, group=ctx.group)
        # every process has the mean over its own rows for a loss
        return back / dist.get_world_size(ctx.group), None


class Tables(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, self.rank, self.world = group, dist.get_rank(), dist.get_world_size()
        self.own = range(self.rank * TABLES // self.world, (self.rank + 1) * TABLES // self.world)
        self.tables = nn.ParameterDict({
            f"table{t}": nn.Parameter(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(t)) * 0.3)
            for t in self.own})

    def forward(self, ids):                                        # ids of the own rows, all tables
        everybody = [torch.empty_like(ids) for _ in range(self.world)]
        dist.all_gather(everybody, ids, group=self.group)
        ids = torch.stack(everybody)                               # world, rows, TABLES
        looked = torch.stack([self.tables[f"table{t}"][ids[..., t]] for t in self.own], 2)
        mine = Exchange.apply(looked, self.group)                  # owner, rows, tables of the owner, DIM
        return mine.permute(1, 0, 2, 3).flatten(1, 2)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 24), nn.SiLU(), nn.Linear(24, DIM))
        n = TABLES + 1
        self.pairs = torch.triu_indices(n, n, 1)
        self.top = nn.Sequential(nn.Linear(DIM + n * (n - 1) // 2, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse):
        low = self.bottom(dense)
        features = torch.cat([low[:, None], sparse], 1)
        dots = features @ features.transpose(1, 2)
        return self.top(torch.cat([low, dots[:, self.pairs[0], self.pairs[1]]], 1))[:, 0]


def clicks(n, seed):
    rng = np.random.default_rng(seed)
    taste = np.random.default_rng(1).normal(size=(TABLES, ROWS, 3))
    ids = np.minimum(rng.geometric(0.08, (n, TABLES)) - 1, ROWS - 1)
    dense = rng.normal(size=(n, DENSE))
    vectors = taste[np.arange(TABLES), ids]
    score = (vectors[:, :4].sum(1) * vectors[:, 4:].sum(1)).sum(1) / 3 + dense[:, 0] - 0.7
    y = rng.random(n) < 1 / (1 + np.exp(-score))
    return torch.tensor(dense).float(), torch.tensor(ids), torch.tensor(y).float()


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29622").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10 + rank)
    tables = Tables(dist.new_group(backend="gloo"))               # its traffic does not mix with DDP's
    model = DDP(Dense())
    tables_opt = torch.optim.Adagrad(tables.parameters(), lr=0.1)
    dense_opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    train, test = TensorDataset(*clicks(1280, 2)), TensorDataset(*clicks(512, 3))
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, BATCH // world, sampler=sampler)
    test_loader = DataLoader(test, 128 // world, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = torch.zeros(1)
        for dense, ids, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(dense, tables(ids)), y)
            tables_opt.zero_grad(), dense_opt.zero_grad()
            loss.backward()
            tables_opt.step(), dense_opt.step()
            losses += loss.detach() / len(loader)
        scores, truth = [], []
        with torch.no_grad():
            for dense, ids, y in test_loader:
                scores.append(model.module(dense, tables(ids)))
                truth.append(y)
        both = torch.stack([torch.cat(scores), torch.cat(truth)])
        gathered = [torch.empty_like(both) for _ in range(world)] if rank == 0 else None
        dist.gather(both, gathered, dst=0)
        dist.reduce(losses, dst=0)
        if rank == 0:
            s, t = torch.cat(gathered, 1)
            print(f"epoch {epoch}: loss {losses.item() / world:.4f}, AUC {roc_auc_score(t, s):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
