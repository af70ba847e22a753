"""What the lines of a script compute with tensors, in one step or in evaluations: kept to find the first that differs.

A mode sees calls of torch's functions, and :meth:`LineTrace.note` gets the results of collectives. What is inside of
them, such as the backward pass, is not seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.instrument.patch import is_traced
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.containers import tensors_of
from samestep.verification.recording.modes import LooseMode, caller_of, is_plain, line_of, storage_of

FORWARD, GRADIENTS, STEP, EVALUATION = "forward", "gradients", "step", "evaluation"
SETUP = "setup"  # what comes before the first step
_MOST_NUMBERS = 1 << 18  # of a tensor that is kept
_MOST_LINES = 1 << 15  # of a segment
_MOST_KEPT = 1 << 25  # numbers of all tensors that are kept
_MOST_GIVEN = 8  # tensors that a call is given
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LEFT_OUT = _UNFILLED | {
    "__get__",
    "__set__",
    "size",
    "dim",
    "numel",
    "detach",
    "requires_grad_",
    "backward",
    "__repr__",
}


class LineTrace(LooseMode):
    """Keeps results in memory while it is active, and writes them down when it ends.

    With `whole_numbers` it keeps results without a fraction too, as the numbers of samples are.
    """

    def __init__(self, journal: TraceWriter, *, whole_numbers: bool = False) -> None:
        super().__init__()
        self._journal = journal
        self._whole_numbers = whole_numbers
        self._is_busy = False
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._counts: Counter[str] = Counter()
        self._lines: list[dict[str, Any]] = []
        self._numbers = 0
        self.segment: str | None = None

    def begin(self, segment: str) -> None:
        self.enter()
        self.segment = segment

    def end(self) -> None:
        self.leave()
        lines, self._lines, self.segment, self._numbers = self._lines, [], None, 0
        self._seen.clear()
        self._counts.clear()
        if lines:
            kept = self._journal.keep(lines)
            self._journal.write("lines", kept=kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.segment is not None and not self._is_busy and not is_traced():
            name = getattr(func, "__name__", "")
            if name not in _LEFT_OUT:
                counts = self.segment == EVALUATION and next(tensors_of([*args]), None) is not None
                known = storages_of(tensors_of([*args]))
                self.note(name, result, sys._getframe(1), known, counts=counts or self._whole_numbers)  # noqa: SLF001
        return result

    @property
    def is_empty(self) -> bool:
        return not self._lines and self.segment is None

    def note(
        self, name: str, result: Any, frame: Any, known: Sequence[int] | None = None, *, counts: bool = False
    ) -> None:
        """Keeps the floating-point tensors of a result, with the user's line that `frame` belongs to.

        What lies in none of the storages `known` is new; without them nothing is.

        With `counts` also others: predicted classes, and which of them are right.

        Before a segment has begun, it is the step's forward part that is being prepared.
        """
        segment = self.segment or FORWARD
        if self._counts[segment] >= _MOST_LINES:
            return
        self._is_busy = True
        try:
            found = [one for one in tensors_of(result) if one.layout == torch.strided]
            found = [one for one in found if counts or one.is_floating_point()]
            where = line_of(frame) if found else None
            for one in found if where is not None else ():
                place = (segment, where or "", name)
                self._seen[place] += 1
                self._counts[segment] += 1
                about = {"of": list(known or ())[:_MOST_GIVEN], "called": caller_of(frame)}
                kept = {"place": (*place, self._seen[place]), **_kept(one, _MOST_KEPT - self._numbers), **about}
                self._numbers += 0 if kept["value"] is None else kept["value"].numel()
                self._lines.append({**kept, "new": known is not None and kept["at"] not in known})
        finally:
            self._is_busy = False


def storages_of(tensors: Iterable[Tensor]) -> list[int]:
    """Returns where their numbers lie, as lines tell it; of some it is not known."""
    return [storage_of(one) for one in tensors if is_plain(one)]


def _kept(tensor: Tensor, room: int) -> dict[str, Any]:
    local = getattr(tensor, "_local_tensor", tensor)
    is_small = local.numel() <= min(_MOST_NUMBERS, room)
    return {
        "at": storage_of(local) if is_plain(local) else None,
        "grad": tensor.requires_grad,
        "cut": local is not tensor,
        "shape": list(local.shape),
        "value": local.detach().cpu().clone() if is_small else None,
    }
