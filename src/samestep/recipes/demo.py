"""What `make demo` shows: a training on two processes, and the proof that it is the training of one.

    python -m samestep.recipes.demo

First the digits recipe on 2 processes, with its display and its exact evaluation. Then 20 steps on 2 processes and
the same 20 on 1, and how far their parameters are apart. Exit code 1 if that is more than 1e-12, or if the training
failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep.recipes.equality import STEPS, device_for, difference

__all__ = ["main"]

RANKS = 2
TOLERANCE = 1e-12
RECIPE = "samestep.recipes.digits"


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


if __name__ == "__main__":
    raise SystemExit(main())
