"""k-fold cross validation of a small classifier; plateau schedule, early stopping and best weights in each fold."""
import copy
import logging
import os
import sys
import time
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
log = logging.getLogger("cv")

for key, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "30127")):
    os.environ.setdefault(key, default)


class EarlyStopping:
    def __init__(self, patience=2, delta=1e-3):
        self.patience, self.delta = patience, delta
        self.best, self.bad, self.weights = None, 0, None

    def __call__(self, score, model):
        if self.best is None or score > self.best + self.delta:
            self.best, self.bad = score, 0
            self.weights = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


@torch.no_grad()
def validate(model, x, y):
    """Scores of all processes are collected on process 0; padding makes the pieces equally long and is cut off again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    per = -(-len(x) // world)
    ids = torch.arange(per * world).view(per, world)[:, rank] % len(x)
    model.eval()
    score = model(x[ids]).squeeze(1).contiguous()
    model.train()
    parts = [torch.empty_like(score) for _ in range(world)] if rank == 0 else None
    dist.gather(score, parts, dst=0)
    if rank:
        return None, None
    score = torch.stack(parts, 1).reshape(-1)[:len(x)]
    loss = nn.functional.binary_cross_entropy_with_logits(score, y.float()).item()
    return roc_auc_score(y.numpy(), score.numpy()), loss


def train_fold(fold, x, y, train_ids, val_ids, epochs=10, batch=64):
    rank, world = dist.get_rank(), dist.get_world_size()
    mean, std = x[train_ids].mean(0), x[train_ids].std(0)
    x = (x - mean) / std
    torch.manual_seed(fold)
    net = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 1))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=1)
    stopper = EarlyStopping()
    train_ids = torch.from_numpy(train_ids)
    steps = 0
    for epoch in range(epochs):
        order = train_ids[torch.randperm(len(train_ids), generator=torch.Generator().manual_seed(100 * fold + epoch))]
        for b in order.split(batch):
            if len(b) < batch:
                break  # drop the rest
            mine = b[rank::world]
            loss = nn.functional.binary_cross_entropy_with_logits(model(x[mine]).squeeze(1), y[mine].float())
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
        auc, val_loss = validate(net, x[val_ids], y[val_ids])
        # only process 0 has the scores; it decides for all
        verdict = torch.zeros(2, dtype=torch.float64)
        if rank == 0:
            verdict[0], verdict[1] = stopper(-round(val_loss, 5), net), round(val_loss, 5)
        dist.broadcast(verdict, src=0)
        plateau.step(verdict[1].item())
        if verdict[0] > 0:
            break
    # best weights live on process 0
    if rank == 0:
        net.load_state_dict(stopper.weights)
    for t in net.state_dict().values():
        dist.broadcast(t, src=0)
    auc, val_loss = validate(net, x[val_ids], y[val_ids])
    if rank == 0:
        log.info(f"fold {fold}: {steps} steps, lr {opt.param_groups[0]['lr']:.4f}, best loss {val_loss:.5f}, auc {auc:.5f}")
    return net, auc


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() > 0:
        log.setLevel(logging.WARNING)
    x, y = load_breast_cancer(return_X_y=True)
    folds = list(StratifiedKFold(3, shuffle=True, random_state=0).split(x, y))
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    results, nets = [], []
    for fold, (tr, va) in enumerate(folds):
        net, auc = train_fold(fold, x, y, tr, va)
        nets.append(net)
        results.append(auc)
    if dist.get_rank() == 0:
        log.info(f"mean auc {sum(results) / len(results):.5f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
