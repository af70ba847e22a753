"""Tells of random numbers that a script draws by itself: noise, latent vectors, permutations, mixing weights.

Only what its own lines ask for: what torch draws inside (initialisation, samplers) is seen in its effects.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import call_site, is_own
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []

_TORCH = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
_TORCH_LIKE = ("rand_like", "randn_like", "randint_like")
_NUMPY = ("rand", "randn", "randint", "random", "uniform", "normal", "beta", "permutation", "choice", "standard_normal")
_PYTHON = ("random", "uniform", "randint", "choice", "betavariate", "gauss", "sample", "randrange")


def watch(listener: Callbacks) -> None:
    """Changes the functions as soon as they are imported."""
    when_imported("torch", functools.partial(_watch, listener, (*_TORCH, *_TORCH_LIKE), "torch"))
    when_imported("numpy.random", functools.partial(_watch, listener, _NUMPY, "numpy.random"))
    when_imported("random", functools.partial(_watch, listener, _PYTHON, "random"))


def _watch(listener: Callbacks, names: tuple[str, ...], family: str, module: ModuleType) -> None:
    for name in names:
        setattr(module, name, _telling(listener, getattr(module, name), f"{family}.{name}"))


def _telling(listener: Callbacks, original: Any, name: str) -> Any:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        frame = sys._getframe(1)  # noqa: SLF001
        if not is_own(frame.f_code.co_filename) or _is_compiling():
            return value
        return listener.drawn(name, call_site(frame), value)

    return draw


def _is_compiling() -> bool:
    torch = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)  # a script may draw before torch is there whole
    return compiler is not None and bool(compiler.is_compiling())
