"""Mixed precision: products in bfloat16, weights and gradients in float32, on any number of ranks.

samestep run -n 2 examples/mixed_precision.py
python examples/mixed_precision.py

Nothing changes for being distributed: autocast stands around forward and loss, the backward follows by itself, and
gradients travel and are added as float32. bfloat16 has float32's range and needs no scaling. float16, on CUDA alone,
does: a GradScaler multiplies the loss before the backward, divides the gradients, and leaves a step out where one
overflowed. It looks at averaged gradients, so all ranks decide alike; the calls below do nothing while it is disabled.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def train(world, dtype):
    """Trains two epochs with products in `dtype`; returns the model, the last loss, and the type of its outputs."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(world.device)
    model = samestep.replicate(network, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16)
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.data).float() / 16, torch.tensor(data.target))
    batches = samestep.shards(dataset, world, batch_size=64)
    for _ in range(2):
        for x, y in batches:
            with torch.autocast(world.device.type, dtype=dtype, enabled=dtype is not torch.float32):
                outputs = model(x)
                loss = batches.mean(F.cross_entropy(outputs, y, reduction="none"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return network, batches.loss, outputs.dtype


def main():
    """Trains in float32, in bfloat16, and on CUDA in float16."""
    with samestep.world() as world:
        types = [torch.float32, torch.bfloat16, *([torch.float16] if world.device.type == "cuda" else [])]
        for dtype in types:
            network, loss, outputs = train(world, dtype)
            kept = {parameter.dtype for parameter in network.parameters()}
            if world.is_first:
                print(f"{dtype}: loss {loss:.3f}; outputs are {outputs}, weights {', '.join(map(str, kept))}")


if __name__ == "__main__":
    main()
