"""Weights from a local file, without trusting it: safetensors, or a .pth read with `weights_only=True`.

`torch.load` without that argument runs whatever code the file holds. A file saved from DistributedDataParallel has
`module.` before every name, and the official ImageNet example nests the weights under "state_dict"; both are taken
off.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import samestep

__all__ = ["load_weights"]


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
