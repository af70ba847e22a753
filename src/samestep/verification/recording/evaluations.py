"""What one process writes down of its evaluations, whether it is one of the ranks or the script alone.

phase       from `model.eval()`, or the first batch without gradients, to the next training batch or `model.train()`
collected   what the collectives in it bring: sums of counts, gathered predictions
buffers     digests, once the first batch has gone through the model, and once all have
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.verification.journal import TraceWriter
from samestep.verification.recording.inputs import Inputs

__all__: list[str] = []

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of BatchNorm
_MOST_VALUES = 64
_SUMS = {"all_reduce", "reduce"}
_GATHERS = {"all_gather", "gather", "all_gather_into_tensor", "all_gather_object", "gather_object"}


class Evaluations:
    """Counts and describes them; a training that has not begun has none."""

    def __init__(
        self,
        journal: TraceWriter,
        buffers: Callable[[], dict[str, Any]],
        inputs: Inputs,
        is_placed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._journal = journal
        self._is_placed = is_placed
        self._inputs = inputs
        self._buffers = buffers
        self._count = 0
        self.lasts = False
        self._untold: tuple[str, int] | None = None  # the pass whose buffers, at its end, are still to be told
        self._recent = False  # one has been since the last training batch: what is reduced or printed is of it

    def begin(self) -> None:
        """An evaluation begins, unless one lasts."""
        if not self.lasts:
            self.lasts = self._recent = True
            self._count += 1

    def leave(self) -> None:
        """A model is set to train again; what was evaluated may still be summed up and printed."""
        self.settle()
        self.lasts = False

    def end(self) -> None:
        """Training goes on."""
        self.settle()
        self.lasts = self._recent = False

    def batch(self, key: str, number: int, index: int) -> None:
        """A batch is about to be evaluated; those before it have been, unless somebody loads ahead."""
        self.settle()
        self.begin()
        if index == 0:
            self._inputs.used = False
        self._journal.write("evaluated", phase=self._count, key=key, number=number, index=index)
        if index == 1:
            self._tell_buffers(key, number)

    def passed(self, key: str, number: int) -> None:
        """A pass of an evaluation has ended; a batch that was loaded ahead may still be evaluated."""
        self._untold = key, number

    def settle(self) -> None:
        """The last pass has been evaluated whole: what comes next has begun, or the script has ended."""
        if self._untold is not None:
            self._tell_buffers(*self._untold)
            self._untold = None

    def _tell_buffers(self, key: str, number: int) -> None:
        from samestep.runtime.digest import digest

        if not (self._inputs.used or self._inputs.cannot_tell):
            return  # another model is evaluated, or statistics of one are made
        digests = {name: digest(buffer) for name, buffer in self._buffers().items()}
        if digests:
            self._journal.write("buffers", phase=self._count, key=key, number=number, digests=digests)

    def printed(self, text: Callable[[], str], where: str) -> None:
        """Writes down what is printed of an evaluation."""
        if self._recent:
            self._journal.write("printed", phase=self._count, placed=self._is_placed(), text=text(), where=where)

    def collected(self, call: dict[str, Any], tensors: list[Any], *, waits: bool) -> None:
        """Writes down what a collective has brought."""
        if not self._recent or waits or call["between_two"]:
            return
        told: dict[str, Any] = {"op": call["op"], "where": call["where"], "reduce": call["reduce"]}
        if call["op"] in _SUMS and len(tensors) == 1 and tensors[0].numel() <= _MOST_VALUES:
            told["values"] = tensors[0].detach().double().flatten().tolist()
        elif call["op"] in _GATHERS:
            told["rows"] = _rows(tensors)
        else:
            return
        self._journal.write("collected", phase=self._count, placed=self._is_placed(), **told)


def _rows(tensors: list[Any]) -> int | None:
    """How many rows all of them have together; what was sent counts among them, and is the first of its kind."""
    outputs = tensors[:-1] if len(tensors) > 1 else tensors
    return sum(int(tensor.shape[0]) if tensor.dim() else 1 for tensor in outputs) if outputs else None
