"""Where ranks may begin to differ, unseen: lines that draw random numbers, hash texts, or write to parameters.

Kept only in a run that looks for the line of a difference, from the first model or optimizer on; draws from the start.
"""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from samestep.instrument.patch import call_site, is_own, is_traced, patch
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.by_hand import is_write
from samestep.verification.recording.containers import tensors_of
from samestep.verification.recording.modes import LooseMode, storage_of

_MOST = 1 << 16  # draws, and lines of texts that are hashed
_MOST_WRITES = 8  # to one parameter: the last ones
_SILENT = ("shuffle", "choices")  # of Python's random: draws that nothing else reports
_OF_GENERATORS = (*_SILENT, "sample", "choice", "randint", "randrange", "uniform", "gauss")  # of random.Random


class SourceTrace(LooseMode):
    """Keeps them in memory, and writes them down when the script ends; `parameters` returns all that are trained."""

    def __init__(
        self, journal: TraceWriter, parameters: Callable[[], dict[str, Any]], window: Callable[[], int]
    ) -> None:
        super().__init__()
        self._journal = journal
        self._parameters = parameters
        self._window = window
        self._draws: list[tuple[int, tuple[str, ...]]] = []
        self._hashes: dict[str, None] = {}
        self._writes: dict[int, list[tuple[int, str]]] = {}
        self._names: dict[int, str] = {}  # of parameters, by their storage
        self._is_stepping = False
        for name in _SILENT:
            patch(random, name)(self._silent)
        for name in _OF_GENERATORS:
            patch(random.Random, name)(self._silent)
        patch(builtins, "hash")(self._hash)

    def drew(self) -> None:
        if len(self._draws) < _MOST:
            self._draws.append((self._window(), tuple(_own_lines(sys._getframe(1)))))  # noqa: SLF001

    def _silent(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_for_itself(sys._getframe(1)):  # noqa: SLF001
            self.drew()
        return original(*args, **kwargs)

    def _hash(self, original: Any, value: Any) -> Any:
        if isinstance(value, str | bytes) and len(self._hashes) < _MOST:
            frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
            while frame is not None and not is_own(frame.f_code.co_filename) and _is_a_wrapper(frame):
                frame = frame.f_back
            if frame is not None and is_own(frame.f_code.co_filename):
                self._hashes[call_site(frame)] = None
        return original(value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._is_stepping and is_write(func, name) and not is_traced():
            for one in tensors_of(args[0] if args else None):
                if (one.layout == torch.strided and not one.requires_grad) or one.is_leaf:
                    known = self._writes.setdefault(storage_of(one), [])
                    known.append((self._window(), call_site(sys._getframe(1))))  # noqa: SLF001
                    del known[:-_MOST_WRITES]
        return func(*args, **(kwargs or {}))

    def end(self) -> None:
        self.leave()
        writes = {name: self._writes[place] for place, name in self._names.items() if place in self._writes}
        found = {"draws": self._draws, "hashes": list(self._hashes), "writes": writes}
        self._journal.write("sources", kept=self._journal.keep(found))

    def begin_step(self) -> None:
        """An optimizer steps: what it writes is no difference; the script may let its parameters go before the end."""
        self._is_stepping = True
        for name, one in self._parameters().items():
            data = getattr(one, "data", one)
            if isinstance(data, torch.Tensor) and data.layout == torch.strided:
                self._names[storage_of(data)] = name

    def end_step(self) -> None:
        self._is_stepping = False


def _is_a_wrapper(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("samestep.")


def _is_for_itself(frame: FrameType | None) -> bool:
    """Whether Python's library draws, from a generator of its own: the name of a temporary file, say."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in {"random", "samestep"}:
            return package in sys.stdlib_module_names
        frame = frame.f_back
    return False


def _own_lines(frame: FrameType | None) -> Iterator[str]:
    """The user's lines on the way to a call, the innermost first."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            yield call_site(frame)
        frame = frame.f_back
