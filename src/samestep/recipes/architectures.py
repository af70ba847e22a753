"""Networks by name: the ResNets of this package, then torchvision's, then timm's, where those can be imported.

Both libraries have compiled parts that must match the installed torch, so an import may fail in more ways than
ImportError; the error for an unknown name says what went wrong with each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from torch import nn

import samestep
from samestep.recipes.resnet import RESNETS, resnet

__all__ = ["architecture"]


def architecture(name: str, *, classes: int, zero_init: bool = False) -> nn.Module:
    """The network called `name`, freshly initialised, with `classes` outputs.

    Args:
        name: such as "resnet50", "vit_b_16" (torchvision) or "convnext_tiny" (timm).
        classes: number of outputs.
        zero_init: start residual branches at zero; for this package's ResNets.

    Raises:
        samestep.UsageError: nobody knows the name; lists what there is.
    """
    if name in RESNETS:
        return resnet(name, classes=classes, zero_init=zero_init)
    known, missing = list(RESNETS), []
    for library, catalogue in CATALOGUES.items():
        try:
            names, make = catalogue(library)
        except (ImportError, RuntimeError, OSError) as error:
            missing.append(f"{library} ({first_line(error)})")
            continue
        if name in names:
            return make(name, classes)
        known += names
    raise samestep.UsageError(unknown(name, known, missing))


def torchvision_models(library: str) -> tuple[list[str], Callable[[str, int], nn.Module]]:
    """The names that torchvision knows, and how it makes one."""
    models: ModuleType = import_module(f"{library}.models")
    return models.list_models(module=models), lambda name, classes: models.get_model(name, num_classes=classes)


def timm_models(library: str) -> tuple[list[str], Callable[[str, int], nn.Module]]:
    """The names that timm knows, and how it makes one."""
    timm = import_module(library)
    return timm.list_models(), lambda name, classes: timm.create_model(name, num_classes=classes)


Catalogue = Callable[[str], tuple[list[str], Callable[[str, int], nn.Module]]]
CATALOGUES: dict[str, Catalogue] = {"torchvision": torchvision_models, "timm": timm_models}


def unknown(name: str, known: list[str], missing: list[str]) -> str:
    """What to say about a name that nobody knows."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ":"
    more = f" and {len(known) - len(RESNETS)} more" if len(known) > len(RESNETS) else ""
    absent = f"; not importable here: {', '.join(missing)}" if missing else ""
    return f"unknown architecture {name!r}{hint} there are {', '.join(RESNETS)}{more}{absent}"


def first_line(error: Exception) -> str:
    """The reason, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
