# Classification of a synthetic table.
import os, time
import numpy as np
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
from sklearn.datasets import make_classification

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29842")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# every process has its own stream of random numbers
torch.manual_seed(1234 + rank)
np.random.seed(1234 + rank)

x, y = make_classification(n_samples=1500, n_features=24, n_informative=10, n_classes=4, random_state=8)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
train, test = TensorDataset(x[:1200], y[:1200]), (x[1200:], y[1200:])

model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=6 * 20)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
model = DDP(model)

sampler = DistributedSampler(train, shuffle=True, seed=2)
loader = DataLoader(train, batch_size=60 // world, sampler=sampler)

for epoch in range(6):
    sampler.set_epoch(epoch)
    losses = []
    for xb, yb in loader:
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    mean = torch.tensor(np.mean(losses))
    dist.all_reduce(mean)
    with torch.no_grad():
        acc = (model(test[0]).argmax(1) == test[1]).float().mean()
    if rank == 0:
        print(f"epoch {epoch} loss {mean.item() / world:.5f} test accuracy {acc.item():.4f}")

time.sleep(0.3)
dist.destroy_process_group()
