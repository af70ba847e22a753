"""Base class of subscribers to the patched functions: methods that are not overridden do nothing.

What some methods return replaces what the script would have got, so one subscriber can record a training and another
can let it train on something else. Where several subscribe, the first that returns something else decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samestep.instrument.patch import Install, install, uninstall

if TYPE_CHECKING:
    from samestep.instrument.collective_call import CollectiveCall


@dataclass(frozen=True)
class LoaderPass:
    loader: Any
    key: str  # the line that made it and its number among those made there: the same in every process
    number: int  # of the pass, from 0
    where: str  # the line that began the pass


@dataclass(frozen=True)
class LoadedBatch:
    loader_pass: LoaderPass
    index: int  # in it, from 0
    indices: list[Any] | None  # the samples, where the dataset has an index
    value: Any


class PassIterator(Iterator[LoadedBatch]):
    """What a DataLoader would yield in a pass."""

    def rest(self, length: int | None) -> list[list[Any]] | None:
        """Returns the samples of the batches still to come, without loading them; None where they are not known.

        It reads the sampler to its end: the pass cannot be continued. `length` is the loader's, None where unknown.
        """
        return None


class Callbacks:
    """Called with what a script does."""

    # --- data ---

    def on_pass(self, loader_pass: LoaderPass, own: PassIterator) -> Iterator[Any] | None:
        """Returns an iterator for the script in place of the DataLoader's own, which would yield `own`; or None."""
        return None

    def on_length(self, loader: Any, key: str, own: int) -> int:
        """Returns what `len(loader)` is."""
        return own

    def on_enter_batch(self) -> str | None:
        """A DataLoader's next batch is loaded now; returns what `on_exit_batch` gets."""

    def on_exit_batch(self, entered: str | None) -> None:
        """It is loaded, or that has failed."""

    def on_batch(self, loader_pass: LoaderPass | None, indices: Any, value: Any) -> None:
        """A DataLoader has yielded a batch; `indices` are what its sampler gave for it, None where unknown."""

    def on_pass_end(self, loader_pass: LoaderPass) -> None:
        """A DataLoader has no more batches in this pass."""

    # --- training ---

    def on_optimizer(self, optimizer: Any, where: str) -> None:
        """There is a new optimizer."""

    def on_enter_step(self, optimizer: Any) -> None:
        """An optimizer's `step` begins."""

    def on_exit_step(self, optimizer: Any) -> None:
        """An optimizer's `step` has ended."""

    def before_step(self, optimizer: Any) -> None:
        """An optimizer that no other one steps has its gradients, and is about to change its parameters."""

    def after_step(self, optimizer: Any) -> None:
        """An optimizer that no other one steps has changed its parameters."""

    def on_wrap(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        """A model is a "DistributedDataParallel" or so now; `ranks` average its gradients, None says all."""

    def on_comm_hook(self, name: str, where: str) -> bool:
        """A model is about to reduce its gradients by a hook; returns whether it shall not."""
        return False

    def on_enter_backward(self) -> str | None:
        """A backward pass runs now; returns what `on_exit_backward` gets."""

    def on_exit_backward(self, entered: str | None) -> None:
        """It has ended, or failed."""

    def before_backward(self, root: Any, where: str) -> None:
        """A backward pass is about to begin at the tensor `root`."""

    def after_backward(self) -> None:
        """It has ended."""

    def on_grad(self, inputs: list[Any], gradients: list[Any], where: str) -> None:
        """Gradients of leaves have been returned to the script, which may step with them."""

    # --- communication ---

    def before_init(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of `init_process_group`."""
        return options

    def after_init(self) -> None:
        """A default process group has been initialised."""

    def before_collective(self, call: CollectiveCall) -> None:
        """The rank is about to enter a collective."""

    def on_enter_collective(self, call: CollectiveCall) -> None:
        """The rank enters a collective."""

    def on_exit_collective(self) -> None:
        """The rank leaves the collective, or has failed in it."""

    def after_collective(self, call: CollectiveCall, *, waits: bool) -> None:
        """The rank has left a collective; `waits` says that its tensors are not filled yet."""

    def on_rpc(self, call: str, callee: int, site: str, serving: str) -> None:
        """Calls of torch.distributed.rpc have begun or ended; the arguments are those of `progress.set_calls`."""

    # --- the rest ---

    def on_random(self, name: str, where: str, value: Any, *, own_generator: bool) -> Any:
        """The script has drawn random numbers, maybe from a generator of its own; returns those that it gets."""
        return value

    def on_seed(self, seed: str) -> None:
        """The script has made, or seeded, a generator whose draws are not reported: with this, as text."""

    def on_dropout(self, values: Any) -> None:
        """The script would have drawn a mask for dropout of these values."""

    def on_worker(self, key: str, worker: int, states: dict[str, bytes], used: list[str]) -> None:
        """A DataLoader's worker ends; `states` of its generators when it began, and those `used` since."""

    def on_spawn(self, start: Any, arguments: Any, processes: int) -> bool:
        """The script is about to start ranks by itself; returns whether that has been done for it."""
        return False

    def on_process(self, process: Any) -> bool:
        """The script is about to start a process of `multiprocessing`; returns whether that has been done for it."""
        return False

    def on_print(self, text: Callable[[], str], where: str) -> None:
        """The script has printed a text, which is made when it is asked for."""

    def on_samestep_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The script calls `samestep.name`; returns its arguments."""
        return args, kwargs

    def on_file_write(self, path: str | os.PathLike[str]) -> None:
        """Called before the script writes a file in native code, which raises no audit event."""

    def on_event(self, kind: str, **fields: Any) -> None:
        """Anything else: "mode", "schedule_made", "scheduler", "clip", "scaler", "save", "save_together", "load"."""


SUBSCRIBERS: list[Callbacks] = []  # in the order in which they have subscribed
_listeners: dict[str, list[Callbacks]] = {}


def subscribe(callbacks: Callbacks, *groups: Install) -> None:
    """Calls `callbacks` from now on, and installs the groups of patches that it needs. Imports no torch."""
    SUBSCRIBERS.append(callbacks)
    _listeners.clear()
    install(*groups)


def unsubscribe(kind: type) -> None:
    SUBSCRIBERS[:] = [one for one in SUBSCRIBERS if not isinstance(one, kind)]
    _listeners.clear()


def unsubscribe_all() -> None:
    unsubscribe(Callbacks)
    uninstall()


def listeners(method: str) -> list[Callbacks]:
    """Returns the subscribers that override a method: nothing is looked up for those that would do nothing."""
    if method not in _listeners:
        default = getattr(Callbacks, method)
        _listeners[method] = [one for one in SUBSCRIBERS if getattr(type(one), method) is not default]
    return _listeners[method]


def call(method: str, *args: Any, **kwargs: Any) -> None:
    for one in listeners(method):
        getattr(one, method)(*args, **kwargs)


def notify(kind: str, **fields: Any) -> None:
    for one in listeners("on_event"):
        one.on_event(kind, **fields)
