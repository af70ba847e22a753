"""`samestep.checkpoint`: the state of a run, saved at its steps and epochs and taken up again, alike on every rank.

The usual script lets rank 0 save under an `if`, resumes at the start of the last epoch (its samples are used
twice), and hangs the other ranks when rank 0's disk is full. Here the data cursor and the weights are in one
checkpoint, so neither can be ahead of the other; every verdict of rank 0 reaches all ranks; and what is saved
includes everything the next step depends on.

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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from samestep._version import __version__
from samestep.errors import CheckpointError, Preempted, UsageError
from samestep.progress import phase, resume_from, set_step
from samestep.running.checkpoints import compression, stages, streams, virtual
from samestep.running.checkpoints.directory import Keep, what_is_left
from samestep.running.checkpoints.dropped import close_when_dropped, say_unsaved, told
from samestep.running.checkpoints.due import Due
from samestep.running.checkpoints.every import parse_every
from samestep.running.checkpoints.forgetting import Habit
from samestep.running.checkpoints.format import SCHEMA, Encoder, Manifest, decode
from samestep.running.checkpoints.leaving import Leaving
from samestep.running.checkpoints.named import State, check_names, differences, load, shortened, state_of
from samestep.running.checkpoints.per_rank import gathered, own
from samestep.running.checkpoints.sharded import wanted
from samestep.running.checkpoints.shares import Holding
from samestep.running.checkpoints.stages import Stages
from samestep.running.checkpoints.store import Store
from samestep.runtime.world import World

__all__ = ["Checkpoint", "checkpoint"]


@runtime_checkable
class _Data(Protocol):
    """What a checkpoint calls at the end of a step; :class:`samestep.Shards` is one."""

    def finish_step(self) -> None: ...

    def commit(self) -> None: ...

    def state_dict(self) -> Any: ...


@runtime_checkable
class _Equalisable(Protocol):
    """What may differ between ranks until it is saved; :class:`samestep.Replica` is one (local BatchNorm)."""

    def sync_buffers(self) -> None: ...


def checkpoint(
    path: str | os.PathLike[str] | None,
    world: World,
    *,
    every: int | str | None = None,
    keep: int = 2,
    keep_each: int | None = None,
    time_limit: float | str | None = None,
    **named: Any,
) -> Checkpoint:
    """Resumes from the newest good checkpoint in ``path``, if there is one, and saves there from now on.

    Collective: every rank must call it, with the same arguments. ``path`` must be the same directory for all ranks.

    A save copies the state into host memory, and goes on beside the training: only one at a time, so a slow disk holds
    the training up rather than filling the memory. One that fails because of the disk is reported, and the training
    goes on with the checkpoint before it; at the end of the last epoch, in :meth:`Checkpoint.save` and when the world
    closes it is an error.

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
        2 2 False
    """
    for name, value in (("keep", keep), ("keep_each", keep_each)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}={value!r} must be a whole number, at least 1")
    folder = None if path is None else Path(path)
    return Checkpoint(folder, world, every=every, keep=Keep(keep, keep_each), time_limit=time_limit, named=named)


class Checkpoint:
    """The saved state of a run; made by :func:`samestep.checkpoint`.

    Attributes:
        path: the directory of the checkpoints, or None where nothing is saved.
        resumed: whether an earlier checkpoint was loaded.
        step: optimizer steps committed since the run began, over all its resumptions.
        epoch: epochs finished, likewise.
    """

    def __init__(
        self,
        path: Path | None,
        world: World,
        *,
        every: int | str | None,
        keep: Keep,
        time_limit: float | str | None,
        named: dict[str, Any],
    ) -> None:
        self._every = parse_every(every)
        check_names(named)
        self.path = path
        self.step = 0
        self.epoch = 0
        self._world = world
        self._keep = keep
        self._named = named
        self._data = {name: thing for name, thing in named.items() if isinstance(thing, _Data)}
        self._positions: dict[str, Any] = {}  # in the data, at the last commit or at the start of the epoch's body
        self._within = False
        self._habit = Habit(self._every, named, has_data=bool(self._data))
        self._due = Due(self._every, world, reports=bool(self._data))
        self._leaving = Leaving(world, reports=bool(self._data), saves=path is not None, time_limit=time_limit)
        self._store = None if path is None else Store(path, world)
        world.register(self)
        close_when_dropped(self, world, self._store, self._leaving)
        try:
            self.resumed = self._resume()
        except BaseException:
            self.close()
            raise
        if self._every.seconds is not None or self._leaving.is_possible:
            world.step.enable_requests()
        self._leaving.watch()
        resume_from(self.step)
        self._due.note_save()  # what loading took is no time without a save

    def commit(self) -> None:
        """Ends an optimizer step: its samples count as used, and a checkpoint is saved if one is due.

        Collective: every rank must call it, once after each ``optimizer.step()``.

        Raises:
            CheckpointError: a checkpoint was due, and something in it is no plain data; the step counts all the same.
            Preempted: a rank was asked to make room, or the time limit is near; all have saved this step, and leave
                with exit code 75.
        """
        self._due.request_if_late()
        self._leaving.note_commit(0.0 if self._store is None else self._store.slowest_write)
        for data in self._data.values():
            data.finish_step()
        for data in self._data.values():
            data.commit()
        self.step += 1
        self._note_positions()
        set_step(self.step)
        if self._leaving.is_agreed:
            self._leave()
        if self._store is not None:
            say_unsaved(self._world, self._store.news())
        if self._due.has_come(self.step):
            self._begin_save()

    def _leave(self) -> NoReturn:
        """Saves, and ends this rank as all others do at this step."""
        path = self.save()
        self._say(f"{self._leaving.why}: saved step {self.step} to {path}; rerun the same command to resume")
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
        return None if self._store is None else self._store.settle()

    @phase("save")
    def _begin_save(self) -> None:
        self._due.begin_save()
        if self._store is None:
            return
        try:
            manifest, tensors, holding = self._store.together(self._snapshot)
            drawn = streams.gather(self._world) | virtual.gather(self._world, self._named)
            drawn |= compression.gather(self._world, self._named) | stages.gather(self._named)
            random = Encoder(tensors).encode(drawn, "random")
            say_unsaved(self._world, self._store.begin(replace(manifest, random=random), holding, self._keep))
        finally:
            self._due.note_save()

    def epochs(self, n: int) -> Iterator[int]:
        """Yields the epochs from where the run stands up to ``n - 1``, and saves after the body of each.

        Collective: every rank must run the loop to the same end.

        Leaving the body by ``break`` or an exception does not finish its epoch.

        Args:
            n: epochs of the whole run, those before a resumption included.
        """
        if self.resumed and self.epoch >= n:
            finished = "the epoch is" if n == 1 else f"all {n} epochs are"
            self._say(f"{finished} finished in {self.path}: ask for more, or delete it to start again")
        while self.epoch < n:
            self._within = True
            self._habit.begin_epoch(self.step)
            self._note_positions()
            yield self.epoch
            self._within = False
            self.epoch += 1
            self._habit.end_epoch(self.step)
            if self.epoch == n:
                self.save()
            elif self.epoch % self._every.epochs == 0:
                self._begin_save()

    def close(self) -> None:
        """Waits for the save under way and lets another run use the directory; by itself when the world closes.

        Raises:
            CheckpointError: on rank 0, if that save has failed, unless another exception is on its way.
        """
        self._leaving.close()
        outcome = None if self._store is None else self._store.close(hurry=sys.exc_info()[1] is not None)
        if self.path is not None and isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self._say(f"interrupted after step {self.step}; {what_is_left(self.path)}")
        told(self._world, outcome)

    def release(self) -> None:
        """What the world calls when it closes."""
        self.close()

    def _say(self, line: str) -> None:
        if self._world.is_first:
            sys.stderr.write(f"samestep: {line}\n")

    def _snapshot(self) -> tuple[Manifest, dict[str, Tensor], Holding]:
        """Every rank encodes: a state dict may be collective, and one that cannot be saved must fail everywhere."""
        for thing in self._named.values():
            if isinstance(thing, _Equalisable):
                thing.sync_buffers()
        encoder, staged = Encoder(), Stages(self._named)
        found = {
            name: gathered(thing, staged.whole(name, self._state_of(name)), self._world)
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
            random=None,
        )
        return manifest, encoder.tensors, Holding(encoder)

    def _state_of(self, name: str) -> State:
        """The state to save: of data, within the body of an epoch, the position at the last commit.

        When its loop ends, the data turn to the next epoch while the body goes on. Saved like that, a resumed run
        would train that epoch's samples in the rest of this body. A run that never commits has only the data's word.
        """
        thing = self._named[name]
        state = state_of(thing)
        if self._within and self.step > 0 and name in self._positions:
            state = replace(state, content=self._positions[name])
        if name in self._data and not math.isnan(loss := getattr(thing, "loss", math.nan)):  # all wait now anyway
            return replace(state, content={**state.content, "loss": loss})
        return state

    def _note_positions(self) -> None:
        self._positions = {name: data.state_dict() for name, data in self._data.items()}

    @phase("load")
    def _resume(self) -> bool:
        """Loads the newest good checkpoint on every rank, or on none; returns whether there was one."""
        store = self._store
        name = None if store is None else store.newest()
        if store is None or name is None:
            return False
        manifest, tensors = store.read(name, lambda saved: wanted(saved, self._named))
        staged = store.together(lambda: Stages(self._named))
        saved, random = store.together(lambda: self._fitting(name, manifest, tensors, staged))
        of_virtual_ranks = store.together(lambda: virtual.check(random, self._world))
        store.together(lambda: compression.check(random, self._world, self._named))
        store.together(lambda: self._load(saved))
        store.together(lambda: compression.restore(random, self._world, self._named))
        stages.restore(random, self._named)
        self.step, self.epoch = manifest.step, manifest.epoch
        if of_virtual_ranks:
            store.together(lambda: virtual.restore(random, self._named))
        if of_virtual_ranks or manifest.world_size == self._world.size:
            store.together(lambda: streams.restore(random, self._world))
        counts = ((self.step, "step"), (self.epoch, "epoch"))
        done = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
        self._say(f"resuming from {self.path}/{name}: {done} finished")
        return True

    def _load(self, saved: dict[str, State]) -> None:
        # Data first: they refuse another dataset or seed, and then nothing must have been loaded.
        for name in sorted(self._named, key=lambda name: name not in self._data):
            load(self._named[name], saved[name])

    def _fitting(
        self, name: str, manifest: Manifest, tensors: dict[str, Tensor], staged: Stages
    ) -> tuple[dict[str, State], Any]:
        """Returns the saved states and random streams, after checking that they fit what is named here."""
        states = {key: State(manifest.about[key], decode(tree, tensors)) for key, tree in manifest.state.items()}
        saved = {key: own(state, self._world) for key, state in states.items()}
        present = {key: staged.expected(key, state_of(thing)) for key, thing in self._named.items()}
        if lines := differences(saved, present):
            raise CheckpointError(
                f"{self.path}/{name} does not fit, nothing was loaded (another directory, or deleting this "
                f"one, starts anew):{shortened(lines)}"
            )
        return {key: staged.own(key, state) for key, state in saved.items()}, decode(manifest.random, tensors)
