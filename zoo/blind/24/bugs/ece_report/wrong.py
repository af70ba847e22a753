# Trains a breast-cancer classifier and reports how well its probabilities are calibrated.
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def get_data():
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    y = torch.tensor(y).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    return x[order[:384]], y[order[:384]], x[order[384:568]], y[order[384:568]]


@torch.no_grad()
def expected_calibration_error(model, x, y, bins=10):
    """x, y: the rows of this process"""
    model.eval()
    prob = model(x).squeeze(1).sigmoid()
    which = (prob * bins).long().clamp(max=bins - 1)
    count = torch.zeros(bins).index_add_(0, which, torch.ones_like(prob))
    conf = torch.zeros(bins).index_add_(0, which, prob)
    hits = torch.zeros(bins).index_add_(0, which, y)
    ece = ((conf - hits).abs().sum() / count.sum())
    dist.all_reduce(ece)
    model.train()
    return ece.item() / dist.get_world_size()


def main():
    if "RANK" not in os.environ:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29588"
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    xt, yt, xe, ye = get_data()
    xe, ye = xe[rank::world], ye[rank::world]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1))
    ddp = DistributedDataParallel(model)
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3, eps=1e-4)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(5):
        shuffled = torch.randperm(len(xt), generator=torch.Generator().manual_seed(epoch))
        for batch in shuffled.view(-1, 48):
            mine = batch[rank::world]
            opt.zero_grad()
            bce(ddp(xt[mine]).squeeze(1), yt[mine]).backward()
            opt.step()
        ece = expected_calibration_error(model, xe, ye)
        if rank == 0:
            print(f"epoch {epoch + 1} ece {ece:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
