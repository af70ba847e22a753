"""Writes into a rank's progress record what its script does: steps, collectives, loading, evaluations, backward passes.

The script is not changed: torch's own functions report, from the moment they are imported.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from samestep import progress
from samestep.instrument import collectives, dataloader, rpc, training
from samestep.instrument.callbacks import Callbacks, LoaderPass, subscribe
from samestep.instrument.collective_call import CollectiveCall

LEARNT = 3  # backward passes in which all gradients are looked at; after the second DDP has its final buckets

_kept: dict[int, tuple[Any, list[weakref.ref[Any]]]] = {}  # process groups, and the models that use each


def begin(joined: Callable[[], None] | None = None, joining: Callable[[], None] | None = None) -> None:
    """Writes from now on; calls `joined` when a default process group has been initialised, `joining` before."""
    subscribe(
        ProgressNotes(joined, joining),
        *(training.optimizers, training.wrappers, training.modes, training.backward_passes),
        *(dataloader.batches, collectives.collectives, rpc.calls),
    )


class ProgressNotes(Callbacks):
    def __init__(self, joined: Callable[[], None] | None = None, joining: Callable[[], None] | None = None) -> None:
        self._joined, self._joining = joined, joining
        self._learning: list[LastGradients] = []

    def before_init(self, options: dict[str, Any]) -> dict[str, Any]:
        _release_groups()
        if self._joining is not None:
            self._joining()
        return options

    def after_init(self) -> None:
        if self._joined is not None:
            self._joined()

    def on_enter_collective(self, call: CollectiveCall) -> None:
        progress.enter_collective(call.layer or call.name, call.where, direct=call.is_direct or bool(call.layer))

    def on_exit_collective(self) -> None:
        progress.exit_collective()

    def on_rpc(self, call: str, callee: int, site: str, serving: str) -> None:
        progress.set_calls(call, callee, site, serving)

    def on_enter_step(self, optimizer: Any) -> None:
        del optimizer
        progress.set_phase("optimizer")

    def on_exit_step(self, optimizer: Any) -> None:
        """Counts; a compiled optimizer's steps are not reported, and stay one graph."""
        del optimizer
        progress.set_phase("train")
        progress.count_step()

    def on_wrap(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        """Keeps the model's process group, and learns which of its gradients come last."""
        del where, ranks
        if kind != "DistributedDataParallel":
            return
        if progress.is_attached():
            self._learning.append(LastGradients(model))
        _release_groups()
        _keep_group(model)

    def on_enter_backward(self) -> str:
        return progress.set_phase("backward")

    def on_exit_backward(self, entered: str | None) -> None:
        progress.backward_done()
        progress.set_phase("train" if entered is None or entered == "evaluate" else entered)
        self._learning = [each for each in self._learning if each.continues()]

    def on_enter_batch(self) -> str | None:
        """Begins a phase, but in an evaluation, whose batches are part of it."""
        return None if progress.current_phase() == "evaluate" else progress.set_phase("data")

    def on_exit_batch(self, entered: str | None) -> None:
        if entered is not None:
            progress.set_phase(entered)

    def on_batch(self, loader_pass: LoaderPass | None, indices: Any, value: Any) -> None:
        """Counts the numbers of a training batch; samestep.shards, which is in phase "data", counts its own."""
        del loader_pass, indices
        if progress.current_phase() not in {"evaluate", "data"}:
            progress.add_work({"elements": elements(value)})

    def on_event(self, kind: str, **fields: Any) -> None:
        """A script that sets its model to evaluate may take its time, until it trains again."""
        if kind == "mode" and fields["training"]:
            progress.end_phase("evaluate")
        elif kind == "mode":
            progress.set_phase("evaluate")


def elements(batch: Any) -> int:
    """Returns the numbers in a batch's tensors: what sequences of unlike length make unequal."""
    if isinstance(batch, list | tuple):
        return sum(map(elements, batch))
    if isinstance(batch, Mapping):
        return sum(map(elements, batch.values()))
    counted: int = batch.numel() if hasattr(batch, "numel") else 0
    return counted


def _keep_group(model: Any) -> None:
    """Holds a model's process group, also when the interpreter ends and lets go of everything else.

    A DistributedDataParallel that goes after `destroy_process_group()` is the last owner of its group, which then ends
    gloo's threads with Python's lock in its hands, while one of them waits for that lock to release a tensor (torch
    2.13). So groups outlive their models: they go from Python, which lets go of that lock, or never. Each has a thread
    of gloo and some 15 open files.
    """
    group = model.process_group
    if id(group) not in _kept:
        _kept[id(group)] = group, []
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept[id(group)][1].append(weakref.ref(model))


def _release_groups() -> None:
    for key, (group, models) in [*_kept.items()]:
        if not any(model() is not None for model in models):
            del _kept[key]
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


class LastGradients:
    """Learns which gradients of a DistributedDataParallel come last, of all and of each bucket, and notes when they do.

    A backward pass waits for other ranks from its last gradient on. Which one that is is learnt in the first passes: a
    hook for every parameter, in every step, would take 0.3 ms of a model with 150 of them.
    """

    def __init__(self, wrapped: Any) -> None:
        self._passes = 0
        self._last = self._final = -1  # gradient of a pass, and of every pass once it is known
        self._order: dict[int, int] = {}  # parameter -> how many came before it
        self._wrapped = weakref.ref(wrapped)
        parameters = [each for each in wrapped.module.parameters() if each.requires_grad and each.is_leaf]
        self._handles = [
            each.register_post_accumulate_grad_hook(functools.partial(self._there, number))
            for number, each in enumerate(parameters)
        ]
        self._buckets: dict[int, tuple[int, int]] = {}  # parameter that comes last in it -> number, bytes

    def _there(self, number: int, _: Any) -> None:
        self._last = number
        if self._passes < LEARNT:
            self._order.pop(number, None)
            self._order[number] = len(self._order)
            progress.gradients_ready()
            return
        if number in self._buckets:
            progress.bucket_filled(*self._buckets[number], begun=False)
        if number == self._final:
            progress.gradients_ready()

    def continues(self) -> bool:
        """Returns, after a backward pass, whether all gradients are looked at in the next too."""
        self._passes += self._last >= 0  # else it was another model's
        if self._passes < LEARNT:
            return True
        self._final = self._last
        self._buckets = self._filled()
        for number, handle in enumerate(self._handles):
            if number != self._final and number not in self._buckets:
                handle.remove()
        return False

    def _filled(self) -> dict[int, tuple[int, int]]:
        """Returns which gradient is the last of each bucket; none where the model reports its buckets by itself."""
        wrapped = self._wrapped()
        known = {} if wrapped is None or wrapped._comm_hooks else wrapped._get_ddp_logging_data()  # noqa: SLF001
        members, sizes = known.get("rebuilt_per_bucket_param_indices", ""), known.get("rebuilt_bucket_sizes", "")
        found = {}
        for bucket, (inside, size) in enumerate(zip(members.split(", "), sizes.split(", "), strict=False)):
            numbers = [int(number) for number in inside.split() if int(number) in self._order]
            if numbers:
                found[max(numbers, key=lambda number: self._order[number])] = (bucket, int(size))
        return found
