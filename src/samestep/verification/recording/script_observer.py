"""Base class of the observers that record the ranks and that replay the script alone: it counts windows."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samestep.instrument import (
    collectives,
    dataloader,
    parameter_averaging,
    pipelining,
    randomness,
    samestep_calls,
    script_io,
    training,
)
from samestep.instrument.callbacks import Callbacks, LoadedBatch, LoaderPass, subscribe
from samestep.instrument.collective_call import CollectiveCall
from samestep.instrument.patch import install, on_import, patch
from samestep.launch.rank.observers import Observer, RankContext
from samestep.runtime.digest import digest
from samestep.verification.journal import TraceWriter
from samestep.verification.recording import naming
from samestep.verification.recording.adjusting import adjusted, doubled, raised
from samestep.verification.recording.chance import Draws
from samestep.verification.recording.containers import named_tensors
from samestep.verification.recording.evaluations import Evaluations
from samestep.verification.recording.inputs import Inputs, mixes_samples
from samestep.verification.recording.naming import of_optimizer
from samestep.verification.recording.optimizers import Optimizers
from samestep.verification.recording.spawning import target_of
from samestep.verification.recording.writes import Writes

_GROUPS = (
    *(training.optimizers, training.schedules, training.wrappers, training.synchronisation, training.modes),
    *(training.loaded_weights, training.backward_passes, training.clipping, training.local_tensors),
    *(dataloader.passes, dataloader.datasets, randomness.draws),
    *(script_io.saves_and_loads, script_io.prints, script_io.spawns),
    *(samestep_calls.samestep_calls, parameter_averaging.parameter_averages),
    *(pipelining.pipeline_steps, collectives.collectives),
)


_MOST_COUNTS = 16  # numbers of a sum that counts anything
_MOST_COUNTED = 64  # such sums of a line


class StopRecording(SystemExit):
    """Everything that was asked for has been seen; no `except Exception` shall catch it."""


class ScriptObserver(Observer, Callbacks):
    """Counts steps, and notes what evaluations bring, how the script ends, and when a dataset loads."""

    def open_trace(
        self, order: dict[str, Any], folder: Path, context: RankContext, unseen: Callable[[], int | None]
    ) -> None:
        """Opens the journal; `unseen` returns the window whose inputs no DataLoader tells, if there is one."""
        self.order = order
        self._wanted_traces: dict[str, Any] = order.get("trace") or {}
        self.writes = Writes.watch(order)
        self.journal = TraceWriter(folder, context.rank)
        about = {"spawned": context.spawned, "target": target_of(multiprocessing.current_process())}
        self.journal.write("begin", rank=context.rank, size=context.size, pid=os.getpid(), **about)
        self.optimizers = Optimizers(self.journal)
        self.inputs = Inputs(self.journal, unseen, self.forwarding, self.uses_untrained)
        buffers = self.optimizers.buffers_in_use
        self.evaluations = Evaluations(self.journal, buffers, self.inputs, lambda: self.is_placed, lambda: self.window)
        self.inputs.evaluated = lambda: self.evaluations.unread
        self.draws = Draws()
        self.lines: Any = None  # a LineTrace, while this run looks for a line
        self._traced = 0  # evaluations whose lines were kept
        self.path: Any = None  # a PathTrace, while this run looks for what was decided
        self.sources: Any = None  # a SourceTrace, while it looks for draws, hashes and writes
        self._counted: Counter[str] = Counter()  # line -> sums of counts that were written there
        self.window = 0
        self.micro = 0  # backward passes of this window, so far
        self.scaler: Any = None  # that has multiplied the loss of this window
        self.is_open = False  # something of this window has been seen
        self.is_loading = False
        self.is_preparing = False  # torch gives an optimizer a state to load into
        self._leaves_out = False  # an optimizer was made that this run leaves out
        self._by_hand: Any = None  # a ByHand, once a backward has begun in a script that has no optimizer of torch's
        self._trained: weakref.ref[Any] | None = None  # what a model was given with gradients last
        self._uses: Any = None  # a ParameterUses, where no model is called
        self._is_called = False  # a model was, with gradients

    def end(self, error: BaseException | None) -> None:
        with contextlib.suppress(StopRecording):
            self.settle()
        self.end_trace()
        if self.path is not None:
            self.path.end(self.window)
        if self.sources is not None:
            self.sources.end()
        self.evaluations.settle()
        name = None if error is None or isinstance(error, SystemExit) else type(error).__name__
        self.journal.write("end", error=name, message=str(error)[:500], enough=isinstance(error, StopRecording))

    @property
    def is_elsewhere(self) -> bool:
        """Whether what is drawn now is drawn by an evaluation, or by a dataset: not by the training."""
        return self.is_loading or self.evaluations.lasts

    @property
    def loss_scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def next_of(self, own: Iterator[LoadedBatch]) -> LoadedBatch | None:
        """What a dataset draws while it loads is in the batch; it is no draw of the training."""
        self.settle()
        self.is_loading = True
        try:
            return next(own, None)
        finally:
            self.is_loading = False

    def forwarding(self, model: Any, data: tuple[Any, ...]) -> None:
        """A model is about to be called: with gradients it trains, without them it may be evaluated.

        `model` is None where the script's functions compute with parameters of no module.
        """
        import torch

        self.settle()
        first = next((one for one in data if isinstance(one, torch.Tensor)), None)
        if torch.is_grad_enabled():
            self._is_called = True
            self._trained = None if first is None else weakref.ref(first)
            self.evaluations.trained()
            self.trace("forward")
            return
        trained = None if self._trained is None else self._trained()  # what is measured on that is the training's
        begins = self.window > 0 and not self.micro and (first is None or first is not trained)
        self.evaluations.ran(begins=begins, by_batch=lambda: model is not None and mixes_samples(model))
        if self.evaluations.phase is not None:
            self.trace("evaluation")

    def watch_uses(self) -> None:
        """Looks at what the script computes with parameters that it trains, if it has called no model by now."""
        if self._uses is not None or self._is_called or self.inputs.cannot_tell or self.window <= 1:
            return
        from samestep.verification.recording.uses import ParameterUses

        self._uses = ParameterUses(
            lambda: [one for optimizer in self.optimizers.all for one in of_optimizer(optimizer)],
            lambda data: self.forwarding(None, data),
            lambda: None if self._by_hand is None else self._by_hand.writes_at,
        )
        self._uses.enter()

    def uses_untrained(self, model: Any) -> None:
        """A model is about to be called, without gradients, of which no optimizer holds a parameter."""

    def on_optimizer(self, optimizer: Any, where: str) -> None:
        """Numbers it, unless this run leaves out what is made at its line."""
        if self.leaves_out(optimizer) or where in self.order.get("left_out", ()):
            optimizer.samestep_left_out = self._leaves_out = True
            return
        if self._by_hand is not None and not self.optimizers.is_by_hand(optimizer):
            self._by_hand.stop()
        self.optimizers.add(optimizer, where)
        self.inputs.watch(optimizer)
        if not self.window:
            self.trace_samples()
        if self.sources is not None:
            self.sources.enter()
        if self.path is None and self._wanted_traces.get("path"):
            from samestep.verification.recording.paths import PathTrace

            self.path = PathTrace(self.journal, self.optimizers.rates)
            self.path.enter()

    @staticmethod
    def leaves_out(optimizer: Any) -> bool:
        """Whether this run takes no notice of an optimizer: one rank trains a model of its own with it."""
        return hasattr(optimizer, "samestep_left_out")

    def ends_step(self, optimizer: Any) -> bool:
        """Ends the traces of a step that was taken; returns whether it is the script's own, and not left out."""
        if self.is_preparing:
            return False
        if self.leaves_out(optimizer):  # so were the backward passes since the last step
            self.is_open, self.micro, self._trained = False, 0, None
            return False
        self.end_trace()
        if self.path is not None:
            self.path.close(self.window)
        return True

    def begin_backward(self, outputs: Any, inputs: list[Any] | None = None) -> None:
        """A backward begins, or gradients of `inputs` have come: the script may be one that steps by its own code."""
        self.settle()
        if self._leaves_out or any(not self.optimizers.is_by_hand(one) for one in self.optimizers.all):
            return
        from samestep.verification.recording.by_hand import ByHand

        self._by_hand = self._by_hand or ByHand(self)
        self._by_hand.backward(outputs, inputs)

    def end_backward(self) -> None:
        if self._by_hand is not None:
            self._by_hand.arm()

    def on_grad(self, inputs: list[Any], gradients: list[Any], where: str) -> None:
        """Counts as a backward where the script may step by its own code."""
        if all(self.optimizers.is_by_hand(one) for one in self.optimizers.all):
            self.before_backward(None, where)
            self.begin_backward(None, inputs)
            self._by_hand.returned(inputs, gradients)
            self.after_backward()

    def trace(self, segment: str) -> None:
        """What is computed from now on belongs to this segment of a step or an evaluation, if lines are looked for."""
        wanted = self._wanted_traces
        is_step = wanted.get("window") == self.window and segment != "evaluation"
        is_evaluation = segment == "evaluation" and self.is_placed and self._traced < wanted.get("evaluations", 0)
        if self.lines is not None and self.lines.segment == "evaluation" and segment != "evaluation":
            self.end_trace()
        if is_step or is_evaluation:
            self._make_lines().begin(segment)

    def _make_lines(self) -> Any:
        from samestep.verification.recording.lines import LineTrace

        whole_numbers = bool({"samples", "unloaded"} & self._wanted_traces.keys())
        self.lines = self.lines or LineTrace(self.journal, whole_numbers=whole_numbers)
        return self.lines

    def trace_samples(self) -> None:
        """Looks at all that is computed from the end of the last step on, if that may make the samples."""
        wanted = self._wanted_traces
        is_free = self.lines is None or self.lines.segment == "setup"
        if is_free and {"samples", "unloaded"} & wanted.keys() and wanted["window"] == self.window:
            self._make_lines().begin("forward")

    def end_trace(self) -> None:
        """Writes down the lines of a step, or an evaluation, that is over."""
        if self.lines is not None and not self.lines.is_empty:
            self._traced += self.lines.segment == "evaluation"
            self.lines.end()

    def sizes_of_saved(self, value: Any) -> dict[str, Any]:
        """Returns how many numbers are saved, and how many of tensors that are an optimizer's state, by their names."""
        own = [] if self._by_hand is None else [one.untyped_storage().data_ptr() for one in self._by_hand.state()]
        known = {one for state in self.optimizers.states() for one in state["state"]}
        reported = list(named_tensors(value))
        mine = {
            name: one.numel()
            for name, one in reported
            if (own and one.untyped_storage().data_ptr() in own) or (known and one.numel() > 1 and digest(one) in known)
        }
        return {"own_state": mine, "numbers": sum(one.numel() for _, one in reported)}

    def settle(self) -> None:
        """Whatever comes now, a step that the script takes by its own code has ended before it."""
        if self._by_hand is not None:
            self._by_hand.settle()

    def on_samestep_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Notes that the script uses samestep, and calls it as this run was ordered to."""
        path = kwargs["path"] if "path" in kwargs else next(iter(args), None)
        self.journal.write("called", name=name, saves=name == "checkpoint" and path is not None)
        return adjusted(self.order, name, args, kwargs)

    def _watch_state_dicts(self, module: Any) -> None:
        """A step that torch takes to give an optimizer a state to load into is none of the script's."""

        @patch(module, "_init_optim_state")
        def init_optim_state(original: Any, *args: Any, **kwargs: Any) -> Any:
            before, self.is_preparing = self.is_preparing, True
            try:
                return original(*args, **kwargs)
            finally:
                self.is_preparing = before

    def note_chosen(self, epoch: LoaderPass) -> None:
        """Keeps which samples of a dataset a pass is over, if these were chosen."""
        from samestep.verification.recording.datasets import chosen

        if (places := chosen(epoch.loader.dataset)) is not None:
            self.journal.write("chosen", key=epoch.key, number=epoch.number, kept=self.journal.keep(places))

    def install_patches(self) -> None:
        """Watches everything from now on; a run in float64 computes so from the first tensor on."""
        if self.order.get("double"):
            on_import("torch", lambda torch: torch.set_default_dtype(torch.float64))
            on_import("torch.nn.modules.module", lambda module: module.register_module_forward_pre_hook(self._double))
        on_import("torch.nn.modules.module", naming.remember)
        on_import("torch.distributed.checkpoint.state_dict", self._watch_state_dicts)
        if not self.order.get("chance"):
            install(randomness.without_dropout_and_autocast)
        subscribe(self, *_GROUPS)
        if self._wanted_traces.get("setup"):
            on_import("torch.utils.data.dataloader", lambda _: self._make_lines().begin("setup"))
        if self._wanted_traces.get("sources"):
            on_import("torch.nn.modules.module", lambda _: self._trace_sources())
        if "samples" in self._wanted_traces:
            on_import("torch.utils.data.dataloader", lambda _: self.trace_samples())

    def _trace_sources(self) -> None:
        from samestep.verification.recording.sources import SourceTrace

        def parameters() -> dict[str, Any]:
            own = {name: one for each in self.optimizers.all for name, one in self.optimizers.parameters(each).items()}
            return own or self.replicated()

        self.sources = SourceTrace(self.journal, parameters, lambda: self.window)

    def replicated(self) -> dict[str, Any]:
        return {}

    def given(self, batch: Any) -> Any:
        """Returns a batch as the script gets it: in float64 where the run computes so."""
        return doubled(batch) if self.order.get("double") else batch

    def _double(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A forward pre-hook of all modules; only those that compute in float64 need their inputs so.

        A copy of lower precision that is evaluated computes in float64, too, with its rounded parameters: the mean over
        a batch is not rounded then, which depends on the batch.
        """
        import torch

        from samestep.verification.recording.flat import dtype

        first = next(module.parameters(recurse=False), None)
        if first is not None and not torch.is_grad_enabled() and self._is_of_low_precision(module):
            module.double()
        return raised(args) if (dtype(module) if first is None else first.dtype) == torch.float64 else None

    def _is_of_low_precision(self, module: Any) -> bool:
        """Whether no optimizer holds any of its parameters, and all are in memory of their own: no part of FSDP's."""
        import torch

        from samestep.verification.recording.modes import is_plain

        held = [one for optimizer in self.optimizers.all for one in of_optimizer(optimizer)]
        own, trained = [*module.parameters()], {id(one) for one in held}
        return all(map(is_plain, held)) and all(
            one.dtype in {torch.bfloat16, torch.float16}
            and one.untyped_storage().nbytes() == one.numel() * one.element_size()
            and id(one) not in trained
            for one in own
        )

    def open_window(self, *, evaluating: bool = False) -> None:
        """Something of a window has been seen, of an evaluation or of its training."""

    @property
    def is_placed(self) -> bool:
        """Whether what is evaluated now is what the ranks had."""
        return True

    def note_evaluation(self) -> None:
        self.settle()
        self.evaluations.begin()
        self.open_window(evaluating=True)

    def note_mode(self, *, training: bool) -> None:
        """A model that is set to evaluate before it has trained is only being built."""
        if training:
            self.evaluations.leave()
        elif self.optimizers.all:
            self.evaluations.begin()

    def after_collective(self, call: CollectiveCall, *, waits: bool) -> None:
        """Writes down what an evaluation's collectives bring; one without gradients may be its first sign."""
        import torch

        if self.lines is None and self._wanted_traces.get("window") == self.window:
            self._make_lines()  # what is brought together before a forward may be what its loss is divided by
        if self.lines is not None:
            counts = self.lines.segment == "evaluation"
            self.lines.note(call.name, call.tensors, sys._getframe(1), counts=counts)  # noqa: SLF001
        self._note_counts(call, waits=waits)
        if self.window and not self.micro and not torch.is_grad_enabled():
            self.evaluations.notice()
        self.evaluations.collected(call.description, call.tensors, waits=waits)

    def _note_counts(self, call: CollectiveCall, *, waits: bool) -> None:
        """Writes down what ranks add up while they train, if it counts anything: samples, tokens, hits."""
        about, tensors = call.description, call.tensors
        is_sum = about["op"] == "all_reduce" and about["reduce"] in {None, "SUM"} and len(tensors) == 1 and not waits
        place = about["where"]
        if not is_sum or self.evaluations.phase is not None or self._counted[place] >= _MOST_COUNTED:
            return
        tensor = getattr(tensors[0], "_local_tensor", tensors[0]).detach()
        if tensor.numel() <= _MOST_COUNTS and not tensors[0].requires_grad:
            values = tensor.double().flatten().tolist()
            if any(value.is_integer() and value > 1 for value in values):
                self._counted[place] += 1
                reported = {"number": self._counted[place], "group": about["group"], "values": values}
                self.journal.write("counted", window=self.window, where=place, **reported)

    def on_file_write(self, path: str | os.PathLike[str]) -> None:
        if self.writes is not None:
            self.writes.note(path)

    def on_print(self, text: Callable[[], str], where: str) -> None:
        self.evaluations.printed(text, where)
