import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_tables(rows=1408):
    """A table with four kinds of events, the last two of them rare."""
    x, y = make_classification(n_samples=rows, n_features=24, n_informative=12, n_classes=4,
                               weights=[0.6, 0.28, 0.08, 0.04], class_sep=1.4, random_state=6)
    x = torch.tensor(x, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(y)
    return TensorDataset(x[:1152], y[:1152]), TensorDataset(x[1152:], y[1152:])


def class_weights(labels):
    counts = torch.bincount(labels, minlength=4).float()
    return counts.sum() / (len(counts) * counts)


def weighted_loss(logits, labels, weights):
    return F.cross_entropy(logits, labels, weight=weights)


class Net(nn.Module):
    def __init__(self, inputs=24, width=64):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.middle = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(self.norm(h + torch.relu(self.middle(h))))


@torch.no_grad()
def per_class_recall(model, data, rank, world):
    x, y = (t[rank::world] for t in data.tensors)
    guess = model(x).argmax(1)
    table = torch.stack([torch.bincount(y[guess == y], minlength=4), torch.bincount(y, minlength=4)])
    dist.all_reduce(table)
    return (table[0] / table[1]).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=128, help="over all processes")
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = make_tables()
    weights = class_weights(train.tensors[1])
    sampler = DistributedSampler(train, shuffle=True, seed=6)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)
    torch.manual_seed(6)
    model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True,
                 auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=2000))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = weighted_loss(model(x), y, weights)
            optimizer.zero_grad()
            loss.backward()
            model.clip_grad_norm_(2.0)
            optimizer.step()
        recall = per_class_recall(model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} recall by class " + " ".join(f"{r:.4f}" for r in recall), flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
