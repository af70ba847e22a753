"""What one process writes down of its evaluations, whether it is one of the ranks or the script alone.

A phase goes from `model.eval()`, or the first data that go through a model without gradients, to the next training. A
script may leave `model.eval()` out: whether a batch was evaluated is then known when the next one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.runtime.digest import digest, digest_of_bytes
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.chance import as_tensor
from samestep.verification.recording.inputs import Inputs

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of BatchNorm
_MOST_VALUES = 1 << 12  # of a sum: a confusion matrix of 64 classes has as many
_SUMS = {"all_reduce", "reduce"}
_BRING_NOTHING = {
    *("barrier", "monitored_barrier", "new_group"),
    *("broadcast", "broadcast_object_list", "scatter", "scatter_object_list"),
}
_GATHERS = {"all_gather", "gather", "all_gather_into_tensor", "all_gather_object", "gather_object"}


class Evaluations:
    """Counts and describes them; a training that has not begun has none."""

    def __init__(
        self,
        journal: TraceWriter,
        buffers: Callable[[], dict[str, Any]],
        inputs: Inputs,
        is_placed: Callable[[], bool] = lambda: True,
        window: Callable[[], int] = lambda: 0,
    ) -> None:
        self._journal = journal
        self._is_placed = is_placed
        self._inputs = inputs
        self._buffers = buffers
        self._window = window
        self._phase = (0, 0)  # the window in which it has begun, and its number there: the same in every process
        self._is_used = False  # data have gone through a model in this phase
        self._announced = False  # by model.eval()
        self._pass: tuple[str, int] | None = None  # the pass that a loop without gradients goes over
        self._pending: tuple[str, int, int] | None = None  # a batch that may be trained on or evaluated
        self._pending_ran: bool | None = None  # whether it went through without gradients; and if so, whether by batch
        self._open: set[tuple[str, int]] = set()  # passes that are not over: what goes through a model is of them
        self._last_pass: tuple[str, int] | None = None  # the pass that was evaluated last
        self._untold: tuple[str, int] | None = None  # the one whose buffers, at its end, are still to be told
        self._recent = False  # one has been since the last training batch: what is reduced or printed is of it
        self._has_run = False  # a model went through, and nothing was reduced or printed since
        self._drew: str | None = None  # what the script has drawn since the last training batch
        self._normalised: set[int] = set()  # ids of the running means that this phase has used

    @property
    def lasts(self) -> bool:
        """Whether what is loaded now is evaluated."""
        return self._announced or self._pass is not None

    @property
    def may_run(self) -> bool:
        """Whether data that go through a model without gradients now are evaluated, and not those of a pass at hand."""
        return self.lasts or not self._open

    @property
    def phase(self) -> str | None:
        """The evaluation at hand; None where training goes on."""
        return self._name if self._is_recent else None

    @property
    def unread(self) -> str | None:
        """The evaluation at hand, if no DataLoader has yielded anything of it."""
        return self.phase if self._last_pass is None else None

    def begin(self) -> None:
        """The script announces an evaluation, unless one lasts."""
        if not self.lasts:
            if self._is_used or not self._recent:
                self._begin()
            self._drew = None
        self._announced = True

    def notice(self) -> None:
        """Something that evaluations do: one has begun, unless this belongs to the last."""
        if not self._recent:
            self._begin()

    def _begin(self) -> None:
        self._recent, self._has_run, self._is_used = True, False, False
        self._normalised = set()
        window, (last, number) = self._window(), self._phase
        self._phase = window, number + 1 if window == last else 1

    def leave(self) -> None:
        """A model is set to train again; what was evaluated may still be summed up and printed."""
        self.settle()
        self._announced, self._pass = False, None

    def end(self) -> None:
        """Training goes on."""
        self.leave()
        self._recent = False
        self._pending = self._last_pass = self._drew = None

    def begin_pass(self, key: str, number: int) -> None:
        """A pass begins: earlier ones over the same loader, or by a loop without gradients, were broken off."""
        self._pass, self._pending = None, None
        self._open = {one for one in self._open if one[0] != key} | {(key, number)}

    def batch(self, key: str, number: int, index: int, *, gradients: bool) -> None:
        """A batch of a pass is about to be used; those before it have been, unless the script loads ahead.

        With `gradients` on it is evaluated if the script has said so, or will turn out to be.
        """
        self.settle()
        self._confirm(key, number)
        if index == 0:
            self._inputs.used = False
        if gradients:
            self._pass = None
        if gradients and not self.lasts:
            self._pending, self._pending_ran = (key, number, index), None
            return
        if not self._announced:
            self.notice()
            self._pass = key, number
        self._tell(key, number, index)

    def _confirm(self, key: str, number: int) -> None:
        """The next batch of a pass is loaded, or it is over: the last one was evaluated if it ran without gradients."""
        if self._pending is not None and self._pending[:2] == (key, number) and self._pending_ran is not None:
            self.notice()
            self._journal.write("ran", phase=self._name, by_batch=self._pending_ran)
            self._tell(*self._pending)
        self._pending = None

    def _tell(self, key: str, number: int, index: int) -> None:
        self._last_pass = key, number
        self._is_used = True
        self._journal.write("evaluated", phase=self._name, key=key, number=number, index=index)
        if index == 1:
            self._tell_buffers(key, number)

    def ran(self, *, begins: bool, by_batch: Callable[[], bool]) -> None:
        """Data go through a model without gradients, which `begins` an evaluation if no DataLoader is being read.

        `by_batch` returns whether its output for one sample depends on the others of the batch.
        """
        if begins and not self.lasts and self.may_run:
            self.notice()
        if self._pending is not None and self._pending_ran is None:
            self._pending_ran = by_batch()
        if self._is_recent and not self._has_run:
            self._has_run = self._is_used = True
            self._journal.write("ran", phase=self._name, by_batch=by_batch())

    def trained(self) -> None:
        """Data go through a model with gradients: it trains, unless the script says that it evaluates."""
        if not self.lasts:
            self.end()

    def drew(self, value: Any) -> None:
        """The script has drawn random numbers itself: with others, an evaluation comes to something else."""
        tensor = as_tensor(value)
        brought = "" if tensor is None else digest(tensor)
        self._drew = digest_of_bytes(f"{self._drew} {brought}".encode())

    def normalised(self, mean: Any) -> None:
        """A BatchNorm has normalised by its statistics, of which this is one."""
        if self.lasts:
            self._normalised.add(id(mean))

    def passed(self, key: str, number: int) -> None:
        """A pass has ended; a batch of it that was loaded ahead may still be evaluated."""
        self._confirm(key, number)
        self._open.discard((key, number))
        self._pass = None
        if self._last_pass == (key, number):
            self._untold = key, number

    def settle(self) -> None:
        """The last pass has been evaluated whole: what comes next has begun, or the script has ended."""
        if self._untold is not None:
            self._tell_buffers(*self._untold)
            self._untold = None

    def _tell_buffers(self, key: str, number: int) -> None:
        if not (self._inputs.used or self._inputs.cannot_tell):
            return  # another model is evaluated, or statistics of one are made
        buffers = self._buffers()
        used = {name.removesuffix(STATISTICS[0]) for name, one in buffers.items() if id(one) in self._normalised}
        unused = () if self._inputs.cannot_tell else [name for name in buffers if _is_statistic(name, but=used)]
        digests = {name: digest(buffer) for name, buffer in buffers.items() if name not in unused}
        if digests:
            self._journal.write("buffers", phase=self._name, key=key, number=number, digests=digests)

    def printed(self, text: Callable[[], str], where: str) -> None:
        if self._is_recent:
            self._has_run = False
            self._journal.write("printed", text=text(), where=where, **self._about())

    def collected(self, call: dict[str, Any], tensors: list[Any], *, waits: bool) -> None:
        if not self._is_recent or call["op"] in _BRING_NOTHING:
            return
        brought: dict[str, Any] = {key: call[key] for key in ("op", "where", "reduce", "group")}
        if waits:
            pass  # its result is not there yet
        elif call["op"] in _SUMS and len(tensors) == 1 and tensors[0].numel() <= _MOST_VALUES:
            brought["values"] = tensors[0].detach().double().flatten().tolist()
        elif call["op"] in _GATHERS:
            brought["rows"] = _rows(tensors)
        self._has_run = False
        self._journal.write("collected", **brought, **self._about())

    @property
    def _is_recent(self) -> bool:
        """Whether what is done now is of an evaluation: not where training may have gone on with a batch."""
        return self._recent and (self._pending is None or self._pending[:2] == self._last_pass)

    @property
    def _name(self) -> str:
        return f"{self._phase[0]}.{self._phase[1]}"

    def _about(self) -> dict[str, Any]:
        return {"phase": self._name, "placed": self._is_placed(), "drew": self._drew}


def _is_statistic(name: str, *, but: set[str]) -> bool:
    """Whether a buffer is of a BatchNorm, and not of one of these modules."""
    module, _, own = name.rpartition(".")
    return own in STATISTICS and f"{module}." not in but and module not in but


def _rows(tensors: list[Any]) -> int | None:
    """How many rows all of them have together; what was sent counts among them, and is the first of its kind."""
    outputs = tensors[:-1] if len(tensors) > 1 else tensors
    return sum(int(tensor.shape[0]) if tensor.dim() else 1 for tensor in outputs) if outputs else None
