# Digits classifier that steps one small optimizer per parameter (keeps the peak memory of big models low).
import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from sklearn.datasets import load_digits

os.environ.setdefault('RANK', '0')
os.environ.setdefault('WORLD_SIZE', '1')
os.environ.setdefault('MASTER_ADDR', 'localhost')
os.environ.setdefault('MASTER_PORT', '29817')
torch.set_num_threads(1)
dist.init_process_group('gloo')
rank = dist.get_rank()
world = dist.get_world_size()

BATCH = 64
EPOCHS = 5

d = load_digits()
images = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(d.target)
train = TensorDataset(images[:1408], labels[:1408])
sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=9)
loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)

torch.manual_seed(100)
net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64, 10),
)
model = DistributedDataParallel(net)
optimizers = {p: torch.optim.Adam([p], lr=4e-3) for p in model.parameters()}


def update(p):
    optimizers[p].step()


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    running = torch.zeros(2)
    for xb, yb in loader:
        model.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        for p in model.parameters():
            update(p)
        running += torch.tensor([loss.item() * len(xb), len(xb)])
    dist.all_reduce(running)
    if rank == 0:
        print(f'epoch {epoch} loss {running[0] / running[1]:.5f}')

with torch.no_grad():
    logits = net(images[1408:])
    test_loss = F.cross_entropy(logits, labels[1408:])
    test_acc = (logits.argmax(1) == labels[1408:]).float().mean()
if rank == 0:
    print(f'test loss {test_loss:.5f} acc {test_acc:.4f}')
    torch.save(net.state_dict(), 'digits_lowmem.pt')
time.sleep(0.3)
dist.destroy_process_group()
