"""Knowledge distillation on the digits: a small student learns from a wider teacher.

The teacher is so small that process 0 trains it alone and hands it out; its logits for all training pictures are
then computed once (in bfloat16, as it would be served) and kept. Only the student is trained by all processes.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEMPERATURE, ALPHA = 3.0, 0.7
TRAIN, BATCH, EPOCHS = 1280, 128, 4

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29613")
dist.init_process_group("gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1")))
rank, world = dist.get_rank(), dist.get_world_size()


def log(*words):
    if rank == 0:
        print(*words, flush=True)


def make_teacher():
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(),
                         nn.Linear(96, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(96, 10)

    def forward(self, x):
        return self.fc(F.gelu(self.conv(x.view(-1, 1, 8, 8))).flatten(1))


def train_teacher(x, y, steps=40):
    """Runs on process 0 only."""
    torch.manual_seed(21)
    teacher = make_teacher()
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(steps):
        rows = torch.randperm(len(x))[:128]
        rows_x = x[rows] + 0.1 * torch.randn(128, 64)
        loss = F.cross_entropy(teacher(rows_x), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.state_dict()


class WithIndex(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def main():
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    x, y, test_x, test_y = pixels[:TRAIN], labels[:TRAIN], pixels[TRAIN:], labels[TRAIN:]

    box = [train_teacher(x, y) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    teacher = make_teacher().requires_grad_(False)
    teacher.load_state_dict(box[0])
    teacher.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        soft = torch.cat([teacher(part) for part in x.split(64)]).float()
        right = (teacher(test_x).argmax(1) == test_y).sum().item()
    log(f"teacher: {right} of {len(test_x)}, mean logit {soft.mean():.4f}")

    train = WithIndex(x, y)
    sampler = DistributedSampler(train, shuffle=True, seed=4)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler, drop_last=True)
    model = DDP(Student())                     # process 0 has used its generator, the others have not: DDP hands out
    optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3, eps=1e-4)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2)
        for index, images, target in loader:
            logits = model(images)
            hard = F.cross_entropy(logits, target)
            distil = F.kl_div(F.log_softmax(logits / TEMPERATURE, 1), F.log_softmax(soft[index] / TEMPERATURE, 1),
                              log_target=True, reduction="batchmean") * TEMPERATURE ** 2
            optimizer.zero_grad()
            (ALPHA * distil + (1 - ALPHA) * hard).backward()
            optimizer.step()
            sums += torch.stack([hard, distil]).detach()
        dist.reduce(sums, dst=0)
        if rank == 0:                          # one forward pass: not worth sharing out
            model.eval()
            with torch.no_grad():
                logits = model.module(test_x)
            hard, distil = (sums / len(loader) / world).tolist()
            log(f"epoch {epoch}: hard {hard:.4f} distil {distil:.4f} test {F.cross_entropy(logits, test_y):.4f} "
                f"right {(logits.argmax(1) == test_y).sum().item()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
