import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2024)

ACCUM = 4
EPOCHS = 3
GLOBAL_MICRO = 32

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:832], labels[:832])
test_x, test_y = images[1200:], labels[1200:]

sampler = DistributedSampler(train_set, shuffle=True, seed=2024)
loader = DataLoader(train_set, batch_size=GLOBAL_MICRO // world_size, sampler=sampler)

net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(16 * 16, 10),
)
model = DDP(net)
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps_per_epoch = -(-len(loader) // ACCUM)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=EPOCHS * steps_per_epoch)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    seen = torch.zeros(2)
    for i, (x, y) in enumerate(loader):
        boundary = (i + 1) % ACCUM == 0
        start = i - i % ACCUM
        window = min(ACCUM, len(loader) - start)
        with contextlib.nullcontext() if boundary else model.no_sync():
            loss = criterion(model(x), y)
            (loss / window).backward()
        if boundary or i + 1 == len(loader):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        seen += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(seen)

    model.eval()
    with torch.no_grad():
        mine = slice(rank, None, world_size)
        hits = torch.tensor([(net(test_x[mine]).argmax(1) == test_y[mine]).sum().item(), len(test_y[mine])])
    dist.all_reduce(hits)
    if rank == 0:
        print(f"[{epoch}] train loss {seen[0] / seen[1]:.4f}  test acc {hits[0] / hits[1]:.4f}", flush=True)

if rank == 0:
    torch.save(net.state_dict(), "digits_cnn.pt")
dist.barrier()
dist.destroy_process_group()
