"""What fake GPUs cost, on and off: pairs in alternation, medians, one thread.

    python scripts/fake_gpus_cost.py           a step on a fake GPU, over the same step written for the CPU
    python scripts/fake_gpus_cost.py --off     import and step without fake GPUs, over the same without the package

The figures stand in docs/fake-gpus.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

from samestep import testing
from samestep.bench.workloads import CNN, MLP, TRANSFORMER, WIDE, Task

PAIRS, STEPS = 15, 4
OFF = """
import sys, time
if sys.argv[1] == "without":  # what samestep.launch takes of the package
    from types import ModuleType
    stub = sys.modules["samestep.fake_gpus"] = ModuleType("samestep.fake_gpus")
    stub.VARIABLE, stub.requested = "SAMESTEP_FAKE_GPUS", lambda: None
began = time.perf_counter()
import samestep.launch.rank.bootstrap
took = time.perf_counter() - began
sys.path.insert(0, "scripts")
import torch
from fake_gpus_cost import CNN, block, trainer
torch.set_num_threads(1)
side = trainer(CNN, "cpu")
block(*side)
print(took, min(block(*side) for _ in range(5)))
"""


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


def on() -> None:
    """Prints one line a network."""
    torch.set_num_threads(1)
    with testing.fake_gpus(1):
        for task in (CNN, MLP, TRANSFORMER, WIDE):
            sides = [trainer(task, device) for device in ("cuda", "cpu")]
            pairs = [[block(*side) for side in sides] for _ in range(PAIRS + 1)][1:]
            print(f"{task.name}: {compared(pairs, 'on a fake GPU', 'on the CPU')}")


def off() -> None:
    """Prints a line for the import of the launcher in a fresh interpreter, and one for a step of the cnn."""

    def measure(kind: str) -> list[float]:
        done = subprocess.run([sys.executable, "-c", OFF, kind], capture_output=True, text=True, check=True)
        return [float(word) for word in done.stdout.split()]

    pairs = [(measure("with"), measure("without")) for _ in range(PAIRS + 1)][1:]
    for place, name in enumerate(("import", "step")):
        print(f"{name}: {compared([[side[place] for side in pair] for pair in pairs], 'with it', 'without')}")


def compared(pairs: list[list[float]], one: str, other: str) -> str:
    """Returns the medians of both sides in ms, and of their ratio."""
    ratios = sorted(first / second for first, second in pairs)
    first, second = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    low, high = ratios[PAIRS // 4], ratios[-PAIRS // 4]
    middle = statistics.median(ratios)
    return (
        f"{first:.1f} ms {one}, {second:.1f} ms {other}; ratio {middle:.2f} "
        f"(half of the pairs from {low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    off() if "--off" in sys.argv[1:] else on()
