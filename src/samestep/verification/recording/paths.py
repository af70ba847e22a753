"""The way that a script takes through its lines, and the numbers that it takes out of tensors on that way.

Where ranks go on at different lines, the number before was another one. Kept from the first optimizer to the end of
the script, by windows. What lies inside torch's functions is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from samestep.instrument.patch import is_traced
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.modes import LooseMode, line_of

RATES = ("", "learning rates")  # a place: from here on they are other ones
_OUT_OF_TENSORS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__", "equal"}
_NO_PLACES = {"__get__", "__set__", "_record_function_enter_new", "_record_function_exit._RecordFunction"}
_MOST_NUMBERS = 64
_MOST_ENTRIES = 1 << 20

Entry = tuple[int, Any]  # number of the place, and what was taken out of a tensor there


class PathTrace(LooseMode):
    """Keeps it in memory, and writes it down when the script ends; `rates` returns those of all optimizers."""

    def __init__(self, journal: TraceWriter, rates: Callable[[], list[float]]) -> None:
        super().__init__()
        self._journal = journal
        self._rates = rates
        self._last_rates: list[float] = []
        self._places: dict[tuple[str, str], int] = {}
        self._windows: dict[int, list[Entry]] = {}
        self._entries: list[Entry] = []
        self._count = 0

    def close(self, window: int) -> None:
        self._windows[window], self._entries = self._entries, []

    def end(self, window: int) -> None:
        self.leave()
        self.close(window)
        path_taken = {"places": list(self._places), "windows": self._windows}
        self._journal.write("path", kept=self._journal.keep(path_taken))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._count < _MOST_ENTRIES and name not in _NO_PLACES and not is_traced():
            where = line_of(sys._getframe(1))  # noqa: SLF001
            if where is not None:
                self._note_rates()
                self._add((where, name), _number(result) if name in _OUT_OF_TENSORS else None)
        return result

    def _note_rates(self) -> None:
        rates = self._rates()
        if rates != self._last_rates:
            self._last_rates = rates
            self._add(RATES, rates)

    def _add(self, place: tuple[str, str], number: Any) -> None:
        self._count += 1
        self._entries.append((self._places.setdefault(place, len(self._places)), number))


def _number(value: Any) -> Any:
    """What can be compared of it: a number, or a list of a few that are no whole ones, as indices of samples are."""
    if isinstance(value, int | float):
        return value
    listed = value.tolist() if hasattr(value, "tolist") else value
    is_short = isinstance(listed, list) and 0 < len(listed) <= _MOST_NUMBERS
    return listed if is_short and all(isinstance(one, float) for one in listed) else None
