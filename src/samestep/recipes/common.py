"""What the recipes share: command lines, how they end, the learning rate of a step, weights from a local file.

A recipe's `main` returns 0, or prints `name: error: …` in one line and returns the error's exit code (2 for what
the caller can fix).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import samestep
from samestep.compress import CODEC_NAMES

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}
EXTRAS = {"sklearn": "scikit-learn", "PIL": "pillow"}


def make_checkpoint(
    args: argparse.Namespace, world: samestep.World, batches: samestep.Shards, **named: Any
) -> samestep.Checkpoint:
    """The checkpoint at the path asked for; without one nothing is saved. Collective: every rank must call."""
    return samestep.checkpoint(args.checkpoint, world, every=args.save_every, batches=batches, **named)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser whose errors are one line, `name: error: …`."""
    started = f"python -m samestep.recipes.{name}"
    return _OneLineParser(
        prog=name,
        description=description,
        epilog=f"one process: {started}; several: samestep run -n 2 -m samestep.recipes.{name}, or torchrun",
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class _OneLineParser(argparse.ArgumentParser):
    """argparse prints the whole usage above an error; the error alone says how to fix it."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def add_training_options(to: argparse.ArgumentParser, *, epochs: int, batch_size: int, lr: float) -> None:
    """The options that all recipes share, with this recipe's defaults."""
    add = to.add_argument
    add("--epochs", type=count(1), default=epochs, metavar="N", help="passes over the training data")
    add("--batch-size", type=count(1), default=batch_size, metavar="N", help="samples a step, over all ranks")
    add("--micro-batch-size", type=count(1), default=None, metavar="N", help="samples a forward, on one rank")
    add("--lr", type=positive, default=lr, metavar="X", help="highest learning rate")
    add("--seed", type=count(0), default=0, metavar="N", help="seed of weights, order and everything random")
    add("--workers", type=count(0), default=0, metavar="N", help="loader processes, for each rank")
    add("--checkpoint", type=Path, default=None, metavar="DIR", help="save there, and resume from there")
    add("--save-every", default="10 min", metavar="TIME", help="how often to save: '10 min', '30 s', '500 steps'")
    add("--precision", choices=sorted(PRECISIONS), default="float32", help="bf16 is mixed: weights stay float32")
    add("--device", default=None, metavar="NAME", help="cpu or cuda; by default this rank's GPU, if there is one")
    add_virtual_ranks(to)
    codecs = f"gradients by {', '.join(CODEC_NAMES)}"
    add("--compress", choices=sorted(CODEC_NAMES), default=None, metavar="CODEC", help=codecs)
    add("--backend", default=None, metavar="NAME", help="process group backend, instead of the rule's choice")


def add_virtual_ranks(to: argparse.ArgumentParser) -> None:
    """The option that makes a training the same to the last bit on any number of ranks."""
    text = "slices of a step: the same bits on 1, 2, 4, … V ranks; V is a power of two"
    to.add_argument("--virtual-ranks", type=count(1), default=None, metavar="V", help=text)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision around the forward; nothing for float32 and float64."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def dtype(precision: str) -> torch.dtype:
    """What the weights are kept in: float32 under bf16 too, because small updates would vanish."""
    return torch.float64 if precision == "float64" else torch.float32


def at_least_float32(scores: torch.Tensor) -> torch.Tensor:
    """Scores in bf16 become float32: a loss summed in 8 bits of mantissa would be no loss."""
    return scores.float() if scores.dtype in {torch.bfloat16, torch.float16} else scores


def count(least: int) -> Callable[[str], int]:
    """An option that is a whole number of at least `least`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return read


def positive(text: str) -> float:
    """An option that is a finite number above 0."""
    return _number(text, "above 0", math.ulp(0.0))


def not_negative(text: str) -> float:
    """An option that is a finite number of 0 or more."""
    return _number(text, "of at least 0", 0.0)


def _number(text: str, what: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {what}")
    return value


def run_main(name: str, body: Callable[[], None]) -> int:
    """Run a recipe to its exit code. What the caller can fix is one line on standard error."""
    try:
        body()
    except samestep.SamestepError as error:
        if error.exit_code != 2:
            raise
        return print_error(name, one_line(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return print_error(name, f"{EXTRAS[error.name]} is not installed: pip install 'samestep[recipes]'", 2)
    return 0


def print_error(name: str, reason: str, code: int) -> int:
    """One line on standard error; the code is passed through."""
    print(f"{name}: error: {reason}", file=sys.stderr, flush=True)
    return code


def one_line(error: Exception) -> str:
    """The message, without the traceback that a loader process wraps around it."""
    last = str(error).strip().splitlines()[-1]
    return last.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")


LAST = 0.1  # of the highest rate


def cosine(optimizer: torch.optim.Optimizer, steps: int, *, warm_up: int = 0) -> LambdaLR:
    """Call its `step()` after each `optimizer.step()`, and nowhere else."""
    return LambdaLR(optimizer, cosine_factor(steps, warm_up))


def cosine_factor(steps: int, warm_up: int) -> Callable[[int], float]:
    """The share of the highest rate at global step k: up in a line to 1, then down half a cosine to a tenth.

    >>> factor = cosine_factor(110, warm_up=10)
    >>> [round(factor(step), 3) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2

    return factor


def load_weights(model: nn.Module, path: Path) -> None:
    """Fills `model` with the weights in `path`.

    Raises:
        samestep.UsageError: no such file, not a file of weights, or weights of another network.
    """
    weights = read_weights(path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise samestep.UsageError(f"the weights in {path} do not fit {type(model).__name__}: {lines[1]}") from error


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Name -> tensor on the host, without `module.` prefixes."""
    if not path.is_file():
        raise samestep.UsageError(f"no file of weights at {path}")
    try:
        is_safe = path.suffix == ".safetensors"
        loaded = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler fails in as many ways as there are wrong bytes
        raise samestep.UsageError(f"{path} cannot be read as weights alone: {reason(error)}") from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise samestep.UsageError(f"{path} holds no state_dict: a mapping of names to tensors is needed")
    return {name.removeprefix("module."): value for name, value in loaded.items()}


def reason(error: Exception) -> str:
    """Why a file could not be read, in one line; torch's own line advises running the code in it."""
    if "weights_only" in str(error):
        return "it holds other objects than tensors, and loading those would run code"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
