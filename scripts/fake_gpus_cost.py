"""What a step costs on a fake GPU, over the same step written for the CPU: alternating blocks, medians, one thread.

    python scripts/fake_gpus_cost.py

The figures stand in docs/fake-gpus.md.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from samestep import testing
from samestep.bench.networks import CNN, MLP, TRANSFORMER, WIDE, Task

PAIRS, STEPS = 15, 4


def trainer(task: Task, device: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """Returns a network of a task, its optimizer, and a batch."""
    network = task.network().to(device)
    dataset = task.dataset()
    x, y = (tensor.to(device) for tensor in dataset[0 : task.batch])
    return network, torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9), x, y


def block(network: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """Returns the seconds of a step, of a few."""
    began = time.perf_counter()
    for _ in range(STEPS):
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    """Prints one line a network."""
    torch.set_num_threads(1)
    with testing.fake_gpus(1):
        for task in (CNN, MLP, TRANSFORMER, WIDE):
            sides = [trainer(task, device) for device in ("cuda", "cpu")]
            pairs = [[block(*side) for side in sides] for _ in range(PAIRS + 1)][1:]
            ratios = sorted(fake / cpu for fake, cpu in pairs)
            fake, cpu = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            low, high = ratios[PAIRS // 4], ratios[-PAIRS // 4]
            print(
                f"{task.name}: {fake:.1f} ms on a fake GPU, {cpu:.1f} ms on the CPU; "
                f"ratio {statistics.median(ratios):.2f} (half of the pairs from {low:.2f} to {high:.2f})"
            )


if __name__ == "__main__":
    main()
