"""The observer that measures a training in its own process, at its own steps, and then the model by itself.

    step      0          1           2          3 … 12          13 … 15        then
    is        learnt     counted     listened   timed           listened       the model alone: batches, layers
    by        hooks of   hooks of    hooks of   a mark where    as 2           nothing: the script is over
              modules    autograd    gradients  the model is
                                                called

Only where nothing but marks is noted are steps timed. A step ends where the optimizer steps, as a run's timeline has
it; of several optimizers where the one does that stepped last for the first time, which is once a round. A new
optimizer makes all of it begin again.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep import progress
from samestep.errors import UsageError
from samestep.instrument.callbacks import Callbacks, subscribe
from samestep.instrument.patch import on_import, patch
from samestep.instrument.samestep_calls import samestep_calls
from samestep.instrument.script_io import spawns
from samestep.instrument.training import Hook, optimizers
from samestep.launch.rank.observers import Observer, RankContext
from samestep.planning.step_trace import FEWEST, LISTENED, StepTrace, Timestamp, timestamp
from samestep.progress import ProgressListener
from samestep.rankenv import variable
from samestep.verification.journal import SPAWNED, TraceWriter
from samestep.verification.recording.adjusting import adjusted
from samestep.verification.recording.script_observer import StopRecording

RESULT = "profile.json"  # beside the journals
WARM_UP = 3  # steps before those that are timed; each of them measures something else
_COUNTED = 1  # the step whose kept bytes are counted


class ProfilingObserver(Observer, ProgressListener, Callbacks):
    """Measures one training; SAMESTEP_VERIFY names a folder, how many steps are timed, and the script, for people."""

    def begin(self, context: RankContext) -> None:
        self._order = json.loads(variable("SAMESTEP_VERIFY") or "{}")
        self._folder = Path(self._order["folder"])
        spawned = context.spawned or context.size > 1
        self.journal = TraceWriter(self._folder / SPAWNED if spawned else self._folder, context.rank)
        self.journal.write("begin", pid=os.getpid())
        if spawned:
            raise StopRecording(0)
        self._thread = threading.get_ident()
        self._optimizers: dict[int, Any] = {}
        self._last: Any = None  # whose step ends a step
        self._undo: list[Callable[[], None]] = []
        self._over = False
        self._has_distributed_sampler = False  # the script deals its data out to ranks, and a batch is one rank's
        self._reset()
        subscribe(self, optimizers, spawns, samestep_calls)
        progress.add_listener(self)
        on_import(
            "torch.optim.optimizer", lambda _: on_import("torch.nn.modules.module", lambda _: self._find_root_modules())
        )
        on_import("torch.autograd.graph", self._patch_refusal)
        on_import("torch.utils.data.distributed", self._patch_sampler)

    def _patch_sampler(self, module: Any) -> None:
        @patch(module.DistributedSampler, "__init__")
        def __init__(original: Any, sampler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self._has_distributed_sampler = True
            original(sampler, *args, **kwargs)

    def _patch_refusal(self, module: Any) -> None:
        """Where torch.func is at work, autograd's hooks are an error: then nothing is counted in the script's steps."""

        @patch(module, "disable_saved_tensors_hooks", compiled=True)
        def disable_saved_tensors_hooks(original: Any, *args: Any) -> Any:
            self._refuses = True
            return original(*args)

    def on_spawn(self, start: Any, arguments: Any, processes: int) -> bool:
        """What starts its own ranks is no training of one process."""
        del start, arguments
        TraceWriter(self._folder / SPAWNED, 0).write("begin", pid=os.getpid(), processes=processes)
        raise StopRecording(0)

    def on_samestep_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checkpoints go elsewhere, and begin anew: the script's own belong to the training that is planned for."""
        if name != "checkpoint":
            return args, kwargs
        return adjusted({"saves": self._folder.parent / "saves"}, name, args, kwargs)

    def end(self, error: BaseException | None) -> None:
        """Makes do with fewer steps, where the script has ended well before there were enough."""
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        if not self._over and well and len(self.steps) > FEWEST:
            self._measure()
        self.journal.write("end", steps=len(self.steps))

    # --- steps ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.steps: list[StepTrace] = []
        self.calls: dict[int, Any] = {}  # by module that the script calls: its largest call
        self.roots: list[Any] = []
        self._called: dict[int, Any] = {}
        self._depth = 0
        self._kept: Any = None
        self._refuses = False  # hooks of autograd are an error in this script
        self._begin_step()

    def _begin_step(self) -> None:
        self._step = StepTrace([("train", timestamp())])
        self._ready: dict[int, tuple[int, Timestamp]] = {}
        self._call = self._passed = 0  # samples: of calls since the last backward, of backwards since a step
        self._repeats = False  # an optimizer is at it, and may call a closure again and again on one batch
        self._reported_samples = 0.0  # samples as `samestep.shards` tells them

    @property
    def is_timed(self) -> bool:
        return WARM_UP <= len(self.steps) < WARM_UP + int(self._order["steps"])

    def on_enter_step(self, optimizer: Any) -> None:
        """Gradients that come later than their optimizer's step are of another model's backward."""
        self._repeats = True
        for parameter in _parameters([optimizer]) if self._ready else ():
            if id(parameter) in self._ready:
                self._step.ready[id(parameter)] = self._ready[id(parameter)]

    def on_exit_step(self, optimizer: Any) -> None:
        if self._over or threading.get_ident() != self._thread:
            return
        self._step.samples, self._passed, self._repeats = max(self._step.samples, self._passed), 0, False
        first, known = not self._optimizers, id(optimizer) in self._optimizers
        if not known:
            self._optimizers[id(optimizer)] = self._last = optimizer
        if not known and not first:
            self._remove_hooks()
            self._reset()
            self._find_root_modules()
        elif optimizer is self._last:
            self._end_step()

    def _end_step(self) -> None:
        self._step.ended = timestamp()
        self._step.samples = int(self._reported_samples) or self._step.samples
        for parameter, when in self._ready.items():
            self._step.ready.setdefault(parameter, when)
        if not self.steps:
            self.roots = self._trained()
        self.steps.append(self._step)
        self._remove_hooks()
        missing = WARM_UP + int(self._order["steps"]) + LISTENED - len(self.steps)
        if not missing:
            self._measure()
            raise StopRecording(0)
        self._tell(f"step {len(self.steps) + 1} of {len(self.steps) + missing}")
        self._prepare()
        self._begin_step()

    def _prepare(self) -> None:
        from torch.nn import Module

        for root in self.roots:
            hook = Hook(self.begin_forward)  # by Module's method: a ScriptModule refuses by its own
            handle = Module.register_forward_pre_hook(root, hook, prepend=True, with_kwargs=True)
            self._undo.append(handle.remove)
        if len(self.steps) == _COUNTED and not self._refuses:
            self._count()
        elif not self.is_timed:
            self._hook_gradients()

    def _remove_hooks(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._kept = None

    def _tell(self, text: str) -> None:
        self.journal.write("at", text=text)

    # --- what steps are measured with -------------------------------------------------------------

    def _find_root_modules(self) -> None:
        """Finds the modules that the script itself calls: those that no other calls."""

        def before(module: Any, _: Any) -> None:
            import torch

            if threading.get_ident() == self._thread and not _is_compiling():
                self._depth += 1
                if self._depth == 1 and torch.is_grad_enabled():
                    self._called[id(module)] = module

        def behind(*_: Any) -> None:
            if threading.get_ident() == self._thread and not _is_compiling():
                self._depth -= 1

        hooks: Any = sys.modules["torch.nn.modules.module"]  # which may be all of torch that there is so far
        self._undo.append(hooks.register_module_forward_pre_hook(before).remove)
        self._undo.append(hooks.register_module_forward_hook(behind, always_call=True).remove)

    def _trained(self) -> list[Any]:
        """Returns those of them that an optimizer holds parameters of, and that are no part of another."""
        held = {id(each) for each in _parameters(self.optimizers)}
        found = [one for one in self._called.values() if any(id(each) in held for each in one.parameters())]
        inner = {id(part) for one in found for part in one.modules() if part is not one}
        return [one for one in found if id(one) not in inner]

    @property
    def optimizers(self) -> list[Any]:
        return list(self._optimizers.values())

    def _count(self) -> None:
        from samestep.planning.model_profile import SavedTensorBytes

        buffers = [each for one in self.roots for each in one.buffers()]
        self._kept = SavedTensorBytes([*self._all_parameters(), *buffers])
        self._kept.__enter__()
        self._undo.append(functools.partial(self._kept.__exit__, None, None, None))

    def _hook_gradients(self) -> None:
        for each in self._all_parameters():
            if each.requires_grad and each.is_leaf:
                self._undo.append(each.register_post_accumulate_grad_hook(self._note_ready).remove)

    def _all_parameters(self) -> list[Any]:
        """Those of the models and of the optimizers, each once."""
        own = [each for one in self.roots for each in one.parameters()]
        return list({id(each): each for each in (*own, *_parameters(self.optimizers))}.values())

    def _note_ready(self, parameter: Any) -> None:
        self._ready[id(parameter)] = (self._step.passes, timestamp())

    def begin_forward(self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The script calls a model; in evaluations, and inside a backward, that is no forward."""
        import torch

        from samestep.planning.model_profile import CapturedCall, batch_size_of

        if (
            _is_compiling()
            or not torch.is_grad_enabled()
            or self._step.pieces[-1][0] in {"backward", "evaluate", "data"}
        ):
            return
        samples = batch_size_of((args, kwargs))
        self._call = max(self._call, samples)
        if not self.is_timed and (id(root) not in self.calls or self.calls[id(root)].samples < samples):
            self.calls[id(root)] = CapturedCall.of(args, kwargs, training=root.training)
        self._step.begin("forward")

    # --- progress listener ------------------------------------------------------------

    def set_phase(self, name: str) -> None:
        """Turns to it; with a backward all that its forward keeps is there."""
        if self._over or threading.get_ident() != self._thread:
            return
        if name == "backward":
            self._step.passes += 1
            self._passed = max(self._passed, self._call) if self._repeats else self._passed + self._call
            self._call = 0
            if self._kept is not None:
                self._step.kept = max(self._step.kept, self._kept.take())
        elif self._kept is not None and self._step.pieces[-1][0] == "evaluate":
            self._kept.take()  # what an evaluation with gradients has kept is for no backward
        self._step.begin(name or "train")

    def add_work(self, work: Mapping[str, float]) -> None:
        """What `samestep.shards` yields is the whole batch of a process that is alone."""
        self._reported_samples += work.get("samples", 0.0)

    # --- the end ----------------------------------------------------------------------------------

    def _measure(self) -> None:
        from samestep.planning.build_profile import Observations, profile_of

        self._over = True
        self._remove_hooks()
        calls = [(root, self.calls[id(root)]) for root in self.roots if id(root) in self.calls]
        timed = range(WARM_UP, WARM_UP + int(self._order["steps"]))
        seen = Observations(self._order["script"], self.steps, timed, calls, self.optimizers)
        try:
            replace(profile_of(seen, self._tell), per_rank=self._has_distributed_sampler).save(
                self._folder.parent / RESULT
            )
        except UsageError as error:
            self.journal.write("refused", why=str(error))


def _parameters(optimizers: list[Any]) -> list[Any]:
    return [each for one in optimizers for group in one.param_groups for each in group["params"]]


def _is_compiling() -> bool:
    import torch  # is there: its functions have called us

    return torch.compiler.is_compiling()
