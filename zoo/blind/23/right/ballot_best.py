"""Small-sample tumour detector: averaged weights are judged every few steps, all workers judge a part, the best are kept."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer

BATCH, MAX_STEPS, JUDGE_EVERY, PATIENCE, DECAY = 40, 60, 4, 4, 0.8

alone = "RANK" not in os.environ
if alone:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("gloo")
me, n = dist.get_rank(), dist.get_world_size()
keeper = n - 1  # the worker with most free memory holds the best copy


def load():
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    g = torch.Generator().manual_seed(77)
    p = torch.randperm(len(x), generator=g)
    flip = torch.rand(120, generator=g) < 0.15  # the hand labels of the small set are known to be noisy
    y[p[:120]] = torch.where(flip, 1 - y[p[:120]], y[p[:120]])
    return x, y, p[:120], p[120:343], p[343:]


def sum_over_all(values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


@torch.no_grad()
def judge(net, rows):
    """Log-loss and F1 over `rows`, counted by all the workers together."""
    part = rows[me::n]
    out = net(x[part]).squeeze(1)
    said, true = out > 0, y[part] > 0.5
    loss, tp, fp, fn, count = sum_over_all([
        F.binary_cross_entropy_with_logits(out, y[part], reduction="sum").item(),
        (said & true).sum().item(), (said & ~true).sum().item(), (~said & true).sum().item(), len(part)])
    return loss / count, 2 * tp / max(2 * tp + fp + fn, 1)


x, y, train, valid, test = load()
torch.manual_seed(20)
model = nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
average = copy.deepcopy(model)
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
best = {"loss": float("inf"), "step": -1, "weights": None}
misses, step, stop = 0, 0, False

while step < MAX_STEPS and not stop:
    order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(step))]
    for batch in order.split(BATCH):
        mine = batch.view(-1, n)[:, me]
        loss = F.binary_cross_entropy_with_logits(model(x[mine]).squeeze(1), y[mine])
        opt.zero_grad()
        loss.backward()
        jobs = [dist.all_reduce(p.grad, async_op=True) for p in reversed(list(model.parameters()))]
        for job in jobs:
            job.wait()
        for p in model.parameters():
            p.grad.div_(n)
        opt.step()
        step += 1
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 1 - DECAY)
        if step % JUDGE_EVERY:
            continue
        vloss, f1 = judge(average, valid)
        verdict = torch.zeros(1, dtype=torch.long)  # 0: on, 1: best so far, 2: enough
        if me == 0:
            if vloss < best["loss"]:
                verdict[0], misses = 1, 0
            else:
                misses += 1
                verdict[0] = 2 if misses >= PATIENCE else 0
            print(f"step {step:2d}  valid log-loss {vloss:.6f}  F1 {f1:.4f}", flush=True)
        dist.broadcast(verdict, src=0)
        if verdict.item() == 1:
            best["loss"], best["step"] = vloss, step
            if me == keeper:
                best["weights"] = [p.detach().clone() for p in average.parameters()]
        if verdict.item() == 2 or step >= MAX_STEPS:
            stop = True
            break

with torch.no_grad():
    for i, p in enumerate(average.parameters()):
        if me == keeper:
            p.copy_(best["weights"][i])
        dist.broadcast(p, src=keeper)
tloss, tf1 = judge(average, test)
if me == 0:
    print(f"stopped at {step}, best at {best['step']}: test log-loss {tloss:.6f}  F1 {tf1:.4f}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
