"""Convolutional digits classifier; processes step by themselves and then meet at the mean of their weights."""
import time
from argparse import ArgumentParser

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

parser = ArgumentParser()
parser.add_argument("--batch", type=int, default=56)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--warmup", type=int, default=10)
opts = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()

images, labels = load_digits(return_X_y=True)
images = torch.from_numpy(images.astype(np.float32)).reshape(-1, 1, 8, 8) / 16
labels = torch.from_numpy(labels)
TRAIN = 1400

torch.manual_seed(1234)
model = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GELU(),
    nn.Flatten(), nn.Linear(24 * 16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=opts.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / opts.warmup))
criterion = nn.CrossEntropyLoss()


def meet():
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / WORLD, model.parameters())


def test_error():
    with torch.no_grad():
        out = model(images[TRAIN:])
        return criterion(out, labels[TRAIN:]).item(), (out.argmax(1) != labels[TRAIN:]).sum().item()


shuffle = np.random.default_rng(17)
for epoch in range(opts.epochs):
    rows = shuffle.permutation(TRAIN).reshape(-1, opts.batch)
    for batch in rows:
        mine = np.split(batch, WORLD)[RANK]
        optimizer.zero_grad()
        criterion(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        scheduler.step()
        meet()
    loss, errors = test_error()
    if RANK == 0:
        print(f"epoch {epoch}: test loss {loss:.6f}, {errors} of {len(labels) - TRAIN} missed", flush=True)

time.sleep(0.3)
dist.destroy_process_group()
