"""How far the parameters of N processes are from those of one, after the same steps.

Two float64 trainings of the digits network: the same seed, the same samples in every step, summed in another order.
SGD with momentum carries every step's gradient into all later ones, so a single sample counted twice, dropped, or
weighed wrongly would show in the second digit rather than the sixteenth. The batch size, 101, divides by nothing:
ranks hold unequal parts, and the epoch, 1437 samples, ends with a short step within the twenty.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch.nn import functional as F

import samestep
from samestep.recipes.digits import DigitNet, load_digits

__all__ = ["device_for", "difference", "trained"]

BATCH_SIZE = 101
STEPS = 20


def device_for(n: int) -> str | None:
    """The CPU where there are GPUs and fewer than `n`, since no two processes train on one; None for the usual."""
    return "cpu" if 0 < torch.cuda.device_count() < n else None


def trained(steps: int = STEPS, device: str | None = None) -> torch.Tensor:
    """The parameters after `steps` steps, as one float64 vector. Collective: every rank must call."""
    train_set, _ = load_digits(torch.float64)
    with samestep.world(device=device) as world:
        model = samestep.replicate(DigitNet().to(world.device, torch.float64), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = samestep.shards(train_set, world, batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE)
        taken = 0
        while taken < steps:
            for images, labels in islice(batches, steps - taken):
                losses = F.cross_entropy(model(images), labels, reduction="none")
                batches.mean(losses).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                batches.commit()
                taken += 1
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def difference(n: int, steps: int = STEPS) -> tuple[float, int]:
    """The largest absolute difference between `n` processes and one, and the number of parameters compared."""
    many, one = (samestep.spawn(trained, size, steps, device_for(n))[0] for size in (n, 1))
    return float((many - one).abs().max()), len(one)
