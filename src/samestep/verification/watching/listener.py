"""Whom the changed functions of torch tell what a script does; every method does nothing until it is overridden.

What a method returns takes the place of what the script would have got, so one listener can record a training and
another can let it train on something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__: list[str] = []


@dataclass(frozen=True)
class Epoch:
    """One pass over a DataLoader.

    Attributes:
        loader: the DataLoader.
        key: where it was made, and which one of those that were made there: the same in every process.
        number: of the pass, from 0.
        where: the line that began the pass.
    """

    loader: Any
    key: str
    number: int
    where: str


@dataclass(frozen=True)
class Batch:
    """What a DataLoader has yielded.

    Attributes:
        epoch: the pass.
        index: in it, from 0.
        indices: the samples, where the dataset has an index.
        value: the batch.
    """

    epoch: Epoch
    index: int
    indices: list[Any] | None
    value: Any


class Own(Iterator[Batch]):
    """What a DataLoader would yield in a pass."""

    def rest(self) -> list[list[Any]] | None:
        """Returns the samples of the batches still to come, without loading them; None where they are not known.

        It reads the sampler to its end: the pass cannot be gone on with.
        """
        return None


class Callbacks:
    """Is told what a script does."""

    def batches(self, epoch: Epoch, own: Own) -> Iterator[Any]:
        """Yields what the script gets in this pass; `own` is what its DataLoader would yield."""
        del epoch
        for batch in own:
            yield batch.value

    def length(self, loader: Any, key: str, own: int) -> int:
        """Returns what `len(loader)` says."""
        del loader, key
        return own

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped."""

    def optimizer_made(self, optimizer: Any, where: str) -> None:
        """There is a new optimizer."""

    def wrapped(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        """A model is a "DistributedDataParallel" or so now; `ranks` average its gradients, None says all."""

    def hooked(self, name: str, where: str) -> bool:
        """A model is about to reduce its gradients by a hook; returns whether it shall not."""
        del name, where
        return False

    def backward(self, root: Any, where: str) -> None:
        """A backward pass is about to begin at the tensor `root`."""

    def after_backward(self) -> None:
        """It has ended."""

    def differentiated(self, inputs: list[Any], gradients: list[Any], where: str) -> None:
        """Gradients of leaves have been returned to the script, which may step with them."""

    def collective(self, call: dict[str, Any]) -> None:
        """The rank is about to enter a collective; `call` says op, where, shapes, dtype, and the like."""

    def drawn(self, name: str, where: str, value: Any) -> Any:
        """The script has drawn random numbers; returns those that it gets."""
        del name, where
        return value

    def dropped(self) -> None:
        """The script would have drawn a mask for dropout."""

    def collected(self, call: dict[str, Any], tensors: list[Any], *, waits: bool) -> None:
        """The rank has left a collective; `waits` says that its tensors are not filled yet."""

    def spawning(self, start: Any, arguments: Any, processes: int) -> bool:
        """The script is about to start ranks by itself; returns whether that has been done for it."""
        del start, arguments, processes
        return False

    def printed(self, text: Callable[[], str], where: str) -> None:
        """The script has printed a text, which is made when it is asked for."""

    def called(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The script calls `samestep.name`; returns with what."""
        del name
        return args, kwargs

    def writes_file(self, path: str | os.PathLike[str]) -> None:
        """Called before the script writes a file in native code, which raises no audit event."""

    def told(self, kind: str, **fields: Any) -> None:
        """Anything else: "scheduler", "clip", "scaler", "save", "load", "eval"."""
