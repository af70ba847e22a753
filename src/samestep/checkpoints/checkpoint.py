"""`samestep.checkpoint`: the state of a run, saved at its steps and epochs and loaded again, equally on every rank.

The data cursor and the weights are in one checkpoint, so neither can be ahead of the other; every verdict of rank 0
reaches all ranks; and what is saved includes everything the next step depends on.

    for epoch in state.epochs(3):     epoch 0          epoch 1
        for x, y in batches: ...      ├ s s s s ┤      ├ s s s s ┤           s  step ended by state.commit()
        evaluate(...)                           ├ e ┤            ├ e ┤       e  rest of the body
                                       [1]      [2]  [3]

A run that ended at [1], within an epoch, yields the same epoch again and its data go on after the last saved step.
At [2], all steps committed and the body not finished, it yields the same epoch again and its data loop is empty:
no step is repeated, the evaluation is. At [3], after the body, it yields the next epoch.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep._version import __version__
from samestep.checkpoints.directory import RetentionPolicy, latest_message
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.extra_state import EXTRAS
from samestep.checkpoints.interval import SaveInterval, SaveTimer, parse_interval
from samestep.checkpoints.manifest import SCHEMA, Manifest, decode
from samestep.checkpoints.pipeline_state import PipelineState
from samestep.checkpoints.settings import Resume, command_line, differences, effective, settings_of
from samestep.checkpoints.sharded_save import LocalShards
from samestep.checkpoints.sharding import target_shardings
from samestep.checkpoints.shutdown import GracefulShutdown
from samestep.checkpoints.state import (
    ObjectState,
    capture_state,
    check_names,
    first_lines,
    gather_per_rank,
    mismatches,
    restore_state,
    take_own,
)
from samestep.checkpoints.store import CheckpointStore
from samestep.checkpoints.writer import THREAD, SaveResult
from samestep.errors import CheckpointError, Preempted, UsageError
from samestep.launch.rank.user_code import warn
from samestep.pipelines.pipeline import Pipeline
from samestep.progress import phase, resume_from, set_step
from samestep.rankenv import variable
from samestep.replicas.replicate import Replica
from samestep.runtime.world import World

__all__ = ["Checkpoint", "checkpoint"]

FRESH = "SAMESTEP_FRESH"  # set by `samestep run --fresh`
_NO_COMMIT = (
    "an epoch is over and commit() was never called: nothing was saved in it, and a resume repeats it. Call "
    "state.commit() after every optimizer.step()"
)
_NO_COMMIT_IN_EPOCH = (
    "an epoch is over in which the optimizer stepped and commit() was not called: its steps are not counted, and a run "
    "that is asked to make room cannot save before the epoch ends. Call state.commit() after every optimizer.step()"
)


@runtime_checkable
class _Data(Protocol):
    """What a checkpoint calls at the end of a step; :class:`samestep.Shards` is one."""

    def finish_step(self) -> None: ...

    def commit(self) -> None: ...

    def state_dict(self) -> Any: ...


def checkpoint(
    path: str | os.PathLike[str] | None,
    world: World,
    *,
    every: int | str | None = None,
    keep: int = 2,
    keep_each: int | None = None,
    time_limit: float | str | None = None,
    resume: bool = True,
    **named: Any,
) -> Checkpoint:
    """Resumes from the newest intact checkpoint in ``path``, if there is one, and saves there from now on.

    Collective: every rank must call it, with the same arguments. ``path`` must be the same directory for all ranks.

    A save copies the state into host memory, and goes on beside the training: only one at a time, so a slow disk holds
    the training up rather than filling the memory. One that fails because of the disk is reported, and the training
    goes on with the checkpoint before it; at the end of the last epoch, in :meth:`Checkpoint.save` and when the world
    closes it is an error.

    A resume says in one line what was given otherwise than in the run that saved: options, learning rates, batch size,
    versions. For this every checkpoint keeps the command line (without the values of options named like a key, token,
    secret or password) and the settings of the named objects; ``samestep checkpoint show`` shows them.

    Saved, and loaded in place on each object's own device: the state of everything in ``named``, as rank 0 holds it,
    and every rank's random streams (torch on the host and the rank's GPU, Python's ``random``, NumPy's). A run
    resumed on as many ranks as saved draws the same random numbers as if it had never stopped. On another number
    of ranks weights and data order go on unchanged, but the random streams are those that the world's seed gives;
    with virtual ranks nothing changes, on any number.

    Args:
        path: a directory for the checkpoints of this run alone; made if need be. None saves nothing, and all else
            stays: `commit` ends steps, `epochs` counts.
        world: the world whose ranks train.
        every: when :meth:`Checkpoint.commit` saves: a number of optimizer steps (100), a time ("30 s", "10 min",
            "2 h"; rank 0's clock counts), or None. The end of every epoch is saved in any case, or with
            "5 epochs" that of every fifth and of the last.
        keep: how many checkpoints stay; older ones are deleted only after a newer one was read back and is right.
        keep_each: checkpoints of steps that it divides stay for ever.
        time_limit: how long this job may run from now on, in seconds or as "2 h"; by default until Slurm ends it,
            where Slurm says when. Shortly before, all ranks save the same step and leave with exit code 75; how long
            before follows from how long steps and saves take. ``float("inf")`` ignores what Slurm says.
        resume: False starts anew (as does ``samestep run --fresh``): the checkpoints in ``path`` are moved into its
            folder ``replaced-1``, ``replaced-2`` and so on, which are never deleted. Where a launcher restarts the
            processes of a run that has begun, they resume all the same.
        named: anything with ``state_dict`` and ``load_state_dict``: models (wrapped or not, in stages or not: names in
            the file are those of the bare, whole module), optimizers, learning-rate schedules, a GradScaler,
            :class:`samestep.Shards`.
            States may hold plain Python data and tensors, also those that are cut among the ranks (DTensor): each rank
            writes its own parts, and reads those that its objects want, cut in another way or not at all; no pickle is
            written or read.

    Raises:
        UsageError: ``every``, ``keep`` or ``time_limit`` makes no sense, or a named object has no state.
        CheckpointError: the directory cannot be used, another run uses it, none of its checkpoints is intact, or the
            newest does not fit the named objects (names, shapes, types); then nothing was loaded.

    Example:
        >>> import samestep, tempfile, torch
        >>> with samestep.world() as world:
        ...     model = torch.nn.Linear(2, 1)
        ...     state = samestep.checkpoint(tempfile.mkdtemp(), world, every=100, model=model)
        ...     for epoch in state.epochs(2):
        ...         state.commit()
        ...     print(state.step, state.epoch, state.resumed)
        2 2 None
    """
    for name, value in (("keep", keep), ("keep_each", keep_each)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}={value!r} must be a whole number, at least 1")
    folder = None if path is None else Path(path)
    retention = RetentionPolicy(keep, keep_each)
    return Checkpoint(
        folder, world, every=every, retention=retention, time_limit=time_limit, resume=resume, named=named
    )


class Checkpoint:
    """The saved state of a run; made by :func:`samestep.checkpoint`.

    Attributes:
        path: the directory of the checkpoints, or None where nothing is saved.
        resumed: the checkpoint that was loaded (its ``path``, ``step`` and ``epoch``, and the ``differences`` between
            what this run and the one that saved were given); None where the run began anew.
        step: optimizer steps committed since the run began, over all its resumptions.
        epoch: epochs finished, likewise.
    """

    def __init__(
        self,
        path: Path | None,
        world: World,
        *,
        every: int | str | None,
        retention: RetentionPolicy,
        time_limit: float | str | None,
        resume: bool,
        named: dict[str, Any],
    ) -> None:
        self._interval = parse_interval(every)
        check_names(named)
        self.path = path
        self.step = 0
        self.epoch = 0
        self._world = world
        self._retention = retention
        self._named = named
        self._data = {name: thing for name, thing in named.items() if isinstance(thing, _Data)}
        self._positions: dict[str, Any] = {}  # in the data, at the last commit or at the start of the epoch's body
        self._in_epoch = False
        self._command = command_line(getattr(sys, "argv", []))  # an embedded interpreter may have none
        self._settings = settings_of(named)
        self._commits = _MissingCommitCheck(self._interval, named, has_data=bool(self._data))
        self._timer = SaveTimer(self._interval, world, reports=bool(self._data))
        self._shutdown = GracefulShutdown(
            world, reports=bool(self._data), saves=path is not None, time_limit=time_limit
        )
        self._store = None if path is None else CheckpointStore(path, world)
        world.register(self)
        # Closed also when nobody refers to it any more, as after a function that has returned; at exit the world is.
        weakref.finalize(self, _close_unreferenced, world, self._store, self._shutdown).atexit = False
        try:
            if not resume or variable(FRESH):
                self._start_anew()
            self.resumed = self._resume()
        except BaseException:
            self.close()
            raise
        if self._interval.seconds is not None or self._shutdown.is_possible:
            world.step.enable_requests()
        self._shutdown.install_handlers()
        resume_from(self.step)
        self._timer.restart()  # what loading took is no time without a save

    def commit(self) -> None:
        """Ends an optimizer step: its samples count as used, and a checkpoint is saved if one is due.

        Collective: every rank must call it, once after each ``optimizer.step()``.

        Raises:
            CheckpointError: a checkpoint was due, and something in it is no plain data; the step counts all the same.
            Preempted: a rank was asked to make room, or the time limit is near; all have saved this step, and leave
                with exit code 75.
        """
        self._timer.request_if_late()
        self._shutdown.on_commit(0.0 if self._store is None else self._store.slowest_write)
        for data in self._data.values():
            data.finish_step()
        for data in self._data.values():
            data.commit()
        self.step += 1
        self._note_positions()
        set_step(self.step)
        if self._shutdown.should_stop:
            self._leave()
        if self._store is not None:
            _report_failed_save(self._world, self._store.poll())
        if self._timer.is_due(self.step):
            self._begin_save()

    def _leave(self) -> NoReturn:
        """Saves, and ends this rank as all others do at this step."""
        path = self.save()
        self._say(f"{self._shutdown.reason}: saved step {self.step} to {path}; rerun the same command to resume")
        raise Preempted(self.step, str(path))

    def save(self) -> Path | None:
        """Saves now, and returns the new checkpoint's folder, None without a path. Collective: every rank must call.

        Raises:
            CheckpointError: on every rank, if it could not be saved; what was saved before is untouched.
        """
        self._begin_save()
        return self.wait()

    @phase("save")
    def wait(self) -> Path | None:
        """Waits for the save under way, and returns its folder. Collective: every rank must call, after a save.

        Raises:
            CheckpointError: on every rank, if it could not be saved.
        """
        return None if self._store is None else self._store.wait()

    @phase("save")
    def _begin_save(self) -> None:
        self._timer.reset_request()
        if self._store is None:
            return
        try:
            manifest, tensors, shards = self._store.run_on_all(self._snapshot)
            captured = {extra.key: extra.capture(self._world, self._named) for extra in EXTRAS}
            found = {key: value for key, value in captured.items() if value is not None}
            manifest = replace(manifest, extra=Encoder(tensors).encode(found, "extra"))
            _report_failed_save(self._world, self._store.start_save(manifest, shards, self._retention))
        finally:
            self._timer.restart()

    def epochs(self, n: int) -> Iterator[int]:
        """Yields the epochs from where the run stands up to ``n - 1``, and saves after the body of each.

        Collective: every rank must run the loop to the same end.

        Leaving the body by ``break`` or an exception does not finish its epoch.

        Args:
            n: epochs of the whole run, those before a resumption included.
        """
        if self.resumed is not None and self.epoch >= n:
            finished = "the epoch is" if n == 1 else f"all {n} epochs are"
            unused = "" if not self.resumed.differences else ", so what was given otherwise now has no effect"
            self._say(
                f"{finished} finished in {self.path}{unused}: ask for more epochs, or start anew with `samestep run "
                "--fresh` or checkpoint(..., resume=False), which keeps the old checkpoints"
            )
        while self.epoch < n:
            self._in_epoch = True
            self._commits.begin_epoch(self.step)
            self._note_positions()
            yield self.epoch
            self._in_epoch = False
            self.epoch += 1
            self._commits.end_epoch(self.step)
            if self.epoch == n:
                self.save()
            elif self.epoch % self._interval.epochs == 0:
                self._begin_save()

    def close(self) -> None:
        """Waits for the save under way and lets another run use the directory; by itself when the world closes.

        Raises:
            CheckpointError: on rank 0, if that save has failed, unless another exception is on its way.
        """
        self._shutdown.close()
        error = sys.exc_info()[1]
        result = None if self._store is None else self._store.close(after_error=error is not None)
        if self.path is not None and isinstance(error, KeyboardInterrupt):
            self._say(f"interrupted after step {self.step}; {latest_message(self.path)}")
        _raise_failed_save(self._world, result)

    def release(self) -> None:
        """What the world calls when it closes."""
        self.close()

    def _say(self, line: str) -> None:
        if self._world.is_first:
            sys.stderr.write(f"samestep: {line}\n")

    def _snapshot(self) -> tuple[Manifest, dict[str, Tensor], LocalShards]:
        """Every rank encodes: a state dict may be collective, and one that cannot be saved must fail everywhere."""
        for thing in self._named.values():
            if isinstance(thing, Replica | Pipeline):
                thing.sync_buffers()  # those of a local BatchNorm differ between the ranks
        encoder, pipelines = Encoder(), PipelineState(self._named)
        found = {
            name: gather_per_rank(thing, pipelines.full(name, self._state_of(name)), self._world)
            for name, thing in self._named.items()
        }
        manifest = Manifest(
            schema=SCHEMA,
            step=self.step,
            epoch=self.epoch,
            world_size=self._world.size,
            samestep=__version__,
            torch=str(torch.__version__),
            about={name: state.about for name, state in found.items()},
            state={name: encoder.encode(state.content, name) for name, state in found.items()},
            extra=None,
            command=self._command,
            settings=self._settings,
        )
        return manifest, encoder.tensors, LocalShards(encoder)

    def _state_of(self, name: str) -> ObjectState:
        """The state to save: of data, within the body of an epoch, the position at the last commit.

        When its loop ends, the data turn to the next epoch while the body goes on. Saved like that, a resumed run
        would train that epoch's samples in the rest of this body. A run that never commits has only the data's word.
        """
        thing = self._named[name]
        state = capture_state(thing)
        if self._in_epoch and self.step > 0 and name in self._positions:
            state = replace(state, content=self._positions[name])
        if name in self._data and not math.isnan(loss := getattr(thing, "loss", math.nan)):  # all wait now anyway
            return replace(state, content={**state.content, "loss": loss})
        return state

    def _note_positions(self) -> None:
        self._positions = {name: data.state_dict() for name, data in self._data.items()}

    def _start_anew(self) -> None:
        """Moves the checkpoints of an earlier run away, but not those of this run before its launcher restarted it."""
        attempts = (variable(name) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
        if self._store is None or any(attempt not in {None, "", "0"} for attempt in attempts):
            return
        if (folder := self._store.replace_all()) is not None:
            self._say(f"starting anew in {self.path}: the checkpoints that were there are now in {folder}")

    @phase("load")
    def _resume(self) -> Resume | None:
        """Loads the newest intact checkpoint on every rank, or on none; None where there was none."""
        store = self._store
        name = None if store is None else store.latest()
        if store is None or name is None:
            return None
        manifest, tensors = store.read(
            name, lambda saved: target_shardings(saved, self._named, lambda thing: capture_state(thing).content)
        )
        pipelines = store.run_on_all(lambda: PipelineState(self._named))
        states, extra = store.run_on_all(lambda: self._fitting(name, manifest, tensors, pipelines))
        if extra is not None:  # a converted checkpoint has none
            for one in EXTRAS:
                store.run_on_all(partial(one.check, extra.get(one.key), self._world, self._named))
        store.run_on_all(lambda: self._load(states))
        self.step, self.epoch = manifest.step, manifest.epoch
        if extra is not None:
            for one in EXTRAS:
                store.run_on_all(partial(one.restore, extra.get(one.key), self._world, self._named))
        counts = ((self.step, "step"), (self.epoch, "epoch"))
        done = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
        loaded = settings_of(self._named)
        differing = differences(manifest, self._command, self._settings, loaded)
        self._settings = effective(manifest, self._settings, loaded)
        self._say("; ".join([f"resuming from {self.path}/{name}: {done} finished", *differing]))
        return Resume(store.path / name, self.step, self.epoch, tuple(differing))

    def _load(self, saved: dict[str, ObjectState]) -> None:
        # Data first: they refuse another dataset or seed, and then nothing must have been loaded.
        for name in sorted(self._named, key=lambda name: name not in self._data):
            restore_state(self._named[name], saved[name])

    def _fitting(
        self, name: str, manifest: Manifest, tensors: dict[str, Tensor], pipelines: PipelineState
    ) -> tuple[dict[str, ObjectState], Any]:
        """Returns the saved states and the extra state, after checking that they fit what is named here."""
        states = {key: ObjectState(manifest.about[key], decode(tree, tensors)) for key, tree in manifest.state.items()}
        saved = {key: take_own(state, self._world) for key, state in states.items()}
        present = {key: pipelines.expected(key, capture_state(thing)) for key, thing in self._named.items()}
        if lines := mismatches(saved, present):
            raise CheckpointError(
                f"{self.path}/{name} does not fit, nothing was loaded (another directory starts anew, and so does "
                f"--fresh in this one):{first_lines(lines)}"
            )
        return {key: pipelines.local(key, state) for key, state in saved.items()}, decode(manifest.extra, tensors)


class _MissingCommitCheck:
    """Warns where optimizers step and no step is ever ended: nothing can be saved within an epoch then.

    Epochs that only evaluate step no optimizer, and a script that names no data has nothing to end: no warning.
    """

    def __init__(self, interval: SaveInterval, named: Mapping[str, Any], *, has_data: bool) -> None:
        self._wants_steps = interval.steps is not None or interval.seconds is not None
        self._has_data = has_data
        self._began = 0
        self._stepped = False
        for thing in named.values():
            if isinstance(thing, Optimizer):
                thing.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def begin_epoch(self, step: int) -> None:
        self._began, self._stepped = step, False

    def end_epoch(self, step: int) -> None:
        """It ends after so many; warns where the script seems to have forgotten them."""
        if step == 0 and self._wants_steps:
            warn(_NO_COMMIT)
        elif step == self._began and self._has_data and self._stepped:
            warn(_NO_COMMIT_IN_EPOCH)


# --- saves that have failed ---------------------------------------------------------------------------------


def _raise_failed_save(world: World, result: SaveResult | None) -> None:
    """Raises why the last save has failed; where another exception is on its way, only reports it."""
    if result is None or result.error is None:
        return
    if sys.exc_info()[1] is None:
        raise result.error
    _report_failed_save(world, result)


def _report_failed_save(world: World, result: SaveResult | None) -> None:
    if result is not None and result.error is not None and world.is_first:
        sys.stderr.write(f"samestep: saving step {result.step} failed: {result.error}; training continues\n")


def _close_unreferenced(world: World, store: CheckpointStore | None, shutdown: GracefulShutdown) -> None:
    shutdown.close()
    if store is None or threading.current_thread().name == THREAD:  # which cannot wait for its own end
        return
    result = store.close()
    if result is not None and result.error is not None:  # which is raised when the world closes
        world.register(SimpleNamespace(release=partial(_raise_failed_save, world, result)), keep_alive=True)
