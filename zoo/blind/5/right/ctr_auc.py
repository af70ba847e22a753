"""Click prediction: embeddings + MLP under FSDP1, class-balanced sampling, AUC over the whole test table."""
import argparse
import functools
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import log_loss, roc_auc_score
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset


def clicks(n, seed):
    g = torch.Generator().manual_seed(seed)
    user, item = torch.randint(0, 60, (n,), generator=g), torch.randint(0, 40, (n,), generator=g)
    hour = torch.rand(n, 4, generator=g)
    taste = torch.sin(user * 0.7) * torch.cos(item * 1.3) * 2 + hour[:, 0] - 2.2
    label = (torch.rand(n, generator=g) < torch.sigmoid(taste)).float()
    return TensorDataset(torch.arange(n), user, item, hour, label)


class BalancedSampler(Sampler):
    """Draws with replacement, clicks as often as non-clicks; all processes draw the same list and take turns."""

    def __init__(self, labels, per_epoch, rank, world):
        share = labels.mean()
        self.weights = torch.where(labels > 0.5, 0.5 / share, 0.5 / (1 - share)).double()
        self.per_epoch, self.rank, self.world, self.epoch = per_epoch, rank, world, 0

    def __len__(self):
        return self.per_epoch // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(71 * self.epoch + 5)
        draw = torch.multinomial(self.weights, self.per_epoch, replacement=True, generator=g)
        return iter(draw[self.rank::self.world].tolist())


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


class ClickModel(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.user, self.item = nn.Embedding(60, dim), nn.Embedding(40, dim)
        self.mix = nn.Linear(2 * dim + 4, 24)
        self.towers = nn.Sequential(Tower(24), Tower(24))
        self.top = nn.Linear(24, 1)

    def forward(self, user, item, hour):
        x = torch.cat([self.user(user), self.item(item), hour], 1)
        return self.top(self.towers(F.relu(self.mix(x)))).squeeze(1)


@torch.no_grad()
def assess(model, loader, total):
    model.eval()
    part = [(i, model(u, v, h).sigmoid(), c) for i, u, v, h, c in loader]
    mine = tuple(torch.cat(col) for col in zip(*part))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    model.train()
    ids, prob, label = (torch.cat(col) for col in zip(*everyone))
    table = {int(i): (p, c) for i, p, c in zip(ids, prob.tolist(), label.tolist())}
    assert len(table) == total
    prob, label = zip(*(table[i] for i in sorted(table)))
    return roc_auc_score(label, prob), log_loss(label, prob), len(prob)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = clicks(2400, 1), clicks(601, 2)
    sampler = BalancedSampler(train.tensors[-1], 1792, rank, world)
    loader = DataLoader(train, args.batch // world, sampler=sampler)
    test_loader = DataLoader(test, 50, sampler=DistributedSampler(test, shuffle=False))

    torch.manual_seed(0)
    model = FSDP(ClickModel(), auto_wrap_policy=ModuleWrapPolicy({Tower}), use_orig_params=True,
                 device_id=torch.device("cpu"))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    warm = functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2, total_iters=10)(opt)
    for epoch in range(args.epochs):
        sampler.epoch = epoch
        for _, user, item, hour, label in loader:
            loss = F.binary_cross_entropy_with_logits(model(user, item, hour), label)
            opt.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            warm.step()
        auc, ce, n = assess(model, test_loader, len(test))
        if rank == 0:
            print(f"epoch {epoch} auc {auc:.4f} log loss {ce:.4f} rows {n}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
