"""What `make demo` shows: a training on two processes, and the proof that it is the training of one.

    python -m samestep.recipes.demo

First the digits recipe on 2 processes, with its display and its exact evaluation. Then 20 steps on 2 processes and
the same 20 on 1, and how far their parameters are apart. Exit code 1 if that is more than 1e-12, or if the training
failed.

Those steps are of two float64 trainings of the digits network: the same seed, the same samples in every step, summed
in another order. SGD with momentum carries every step's gradient into all later ones, so a single sample counted twice,
dropped, or weighed wrongly would show in the second digit rather than the sixteenth. The batch size, 101, divides by
nothing: ranks hold unequal parts, and the epoch, 1437 samples, ends with a short step within the twenty.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional as F

import samestep
from samestep.recipes.digits import DigitNet, load_digits

__all__ = ["main"]

RANKS = 2
TOLERANCE = 1e-12
RECIPE = "samestep.recipes.digits"
BATCH_SIZE = 101
STEPS = 20


def main() -> int:
    """Runs the demonstration; 0 if all of it held."""
    console = Console(highlight=False, soft_wrap=True)
    words = ["run", "-n", str(RANKS), "-m", RECIPE]
    if (device := device_for(RANKS)) is not None:
        words += ["--device", device]
    console.print(f"\n[bold]Handwritten digits on {RANKS} processes[/]   samestep {' '.join(words)}\n")
    ended = train(words)
    if ended["exit"] != 0:
        return 1
    console.print(f"\n[bold]The same {STEPS} steps on {RANKS} processes and on 1[/]   SGD with momentum, float64\n")
    largest, parameters = difference(RANKS)
    held = largest < TOLERANCE
    verdict = "[green]the same training[/]" if held else "[red]another training[/]"
    console.print(f"{parameters:,} parameters, at most {largest:.1e} apart (allowed: {TOLERANCE:.0e}): {verdict}")
    console.print(f"\nThe run's files lie in {ended['run_dir']}\n", markup=False)
    return 0 if held else 1


def train(words: Sequence[str]) -> dict[str, Any]:
    """Runs the digits recipe as a user would; what `samestep run --json` says of it.

    Args:
        words: of samestep's command line.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [sys.executable, "-m", "samestep", words[0], "--json", str(file), *words[1:]]
        code = subprocess.run(command, check=False).returncode
        if not file.exists():
            return {"exit": code or 1, "run_dir": None}
        ended: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return ended


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


if __name__ == "__main__":
    raise SystemExit(main())
