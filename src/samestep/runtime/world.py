"""The world: this process's place among the ranks, its device, its groups; closed on every way out.

`init_process_group` and `destroy_process_group` of torch.distributed leave to the script which launcher it runs
under, which backend fits, which GPU is its own, and what happens on an error. `world()` is all of it, once. A
process that nothing launched is a world of one: it needs no group, and the same script runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from samestep import events, progress, rankenv
from samestep.errors import RankVariablesError, RendezvousError, UsageError
from samestep.launch.rank import control, progress_notes
from samestep.launch.rank.excepthook import end_in_one_line
from samestep.launch.rank.observers import RankContext
from samestep.launch.rank.timeline import Timeline
from samestep.paths import RunDirectory
from samestep.runtime import rng
from samestep.runtime.axis import Axis
from samestep.runtime.membership import Membership, join_alone, join_ranks, use_existing_group
from samestep.runtime.step_state import StepState
from samestep.runtime.virtual import VirtualRanks

__all__ = ["Axis", "World", "world"]


class Releasable(Protocol):
    """A user of a process group, or of a lock of this run."""

    def release(self) -> None:
        """Releases it; called when the world closes."""


class World(Membership):
    """All ranks of a run, seen from one of them. Made by :func:`samestep.world`.

    Attributes:
        rank: this process, 0 to size - 1.
        size: the number of processes.
        local_rank: this process among those of its host.
        local_size: the processes of its host.
        host_index: its host among the hosts, in order of their lowest rank.
        device: the device that this rank owns.
        input_device: where tensors from `shards` arrive: the same; for a pipeline with devices of its own, its first.
        backend: what carries the gradients ("gloo", "nccl", …); None in a world of one.
        everyone: the axis of all ranks.
        data: the axis of ranks that hold the same parameters and average their gradients.
        pipeline: the axis of ranks that hold the stages of one replica.
        seed: the run's seed, or None if the global generators were left alone.
        run_dir: where this run's files lie, or None.
        step: what all ranks agree on, step by step.
        virtual: the slices of a step that this rank computes, or None: then it computes one.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        seed: int | None,
        run_dir: Path | None,
        virtual_ranks: int | None = None,
        tensorboard: str | Path | None = None,
    ) -> None:
        super().__init__(**vars(membership))
        self.input_device = self.device
        self.seed = seed
        self.run_dir = run_dir
        self.step = StepState()
        self.virtual = None if virtual_ranks is None else self._virtual(virtual_ranks)
        self._open = True
        self._users: list[Callable[[], Any]] = []
        self._ids = self._copy_ids = 0
        self._rng_diverged = False
        self._metrics = MetricLog(tensorboard, writes=self.is_first)
        self._timeline = start_event_log(run_dir, self.rank, self.size)
        self._error: BaseException | None = None  # that ended the `with` block
        atexit.register(self.close)

    def _virtual(self, count: int) -> VirtualRanks:
        if self.pipeline.size > 1:
            raise UsageError("virtual_ranks and pipeline cannot be had together: the stages of a pipeline do not move")
        self.data.tree_sums = True
        return VirtualRanks(count, self.data.rank, self.data.size, self.seed or 0, self.device)

    @property
    def slices(self) -> int:
        """Into how many slices a step is cut: the virtual ranks, or the ranks of the data axis."""
        return self.data.size if self.virtual is None else self.virtual.count

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    @property
    def replicas(self) -> list[Any]:
        """The live models made by :func:`samestep.replicate` in this world, oldest first."""
        return [user for user in self._live_users() if isinstance(user, torch.nn.Module)]

    def next_id(self) -> int:
        """Returns 1, 2, 3, …: the same on every rank for what all ranks make in the same order."""
        self._ids += 1
        return self._ids

    def next_copy_id(self) -> int:
        """Returns -1, -2, -3, … for copies of replicas, which one rank may make alone: it must not count ahead."""
        self._copy_ids += 1
        return -self._copy_ids

    def check_open(self) -> None:
        """Raises StepError where the world was closed and had other ranks."""
        self.everyone.check_open()

    def diverge_rng(self) -> None:
        """Gives each rank of the data axis global random streams of its own, once; until then they are alike.

        Virtual ranks have theirs within their slices; between steps all ranks draw alike.
        """
        if self.seed is not None and not self._rng_diverged and self.virtual is None:
            rng.seed_everything(self.seed, "step", self.data.rank)
        self._rng_diverged = True

    def register(self, user: Releasable, *, keep_alive: bool = False) -> None:
        """Releases a user of the process group, or of a lock of this run, before the world closes.

        It is forgotten when nobody else refers to it, unless `keep_alive`.
        """
        self._users.append((lambda: user) if keep_alive else weakref.ref(user))

    def _live_users(self) -> list[Any]:
        return [user for reference in self._users if (user := reference()) is not None]

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns a process group of some ranks, or None on a rank that is not among them.

        Collective: every rank of the world must call it, members or not, in the same order.

        Args:
            ranks: global ranks, each once.

        Raises:
            UsageError: a rank is out of range or named twice.
        """
        wanted = sorted(ranks)
        if len(set(wanted)) != len(wanted) or not wanted or wanted[0] < 0 or wanted[-1] >= self.size:
            raise UsageError(f"group({list(ranks)}) must name ranks from 0 to {self.size - 1}, each once")
        if self.size == 1:
            return None
        group = dist.new_group(wanted)
        return group if self.rank in wanted else None

    def barrier(self) -> None:
        """Waits until every rank is here. Collective: every rank must call it.

        Raises:
            StepError: the world was closed.
        """
        self.check_open()
        if self.everyone.control is not None:
            dist.barrier(group=self.everyone.control)

    def generator(self, purpose: str, *, per_rank: bool = True) -> torch.Generator:
        """Returns a random stream of its own for `purpose`, on the host.

        Args:
            purpose: a name; two names never share a stream.
            per_rank: each rank draws its own numbers; false gives all ranks the same.
        """
        rank = (self.rank,) if per_rank else ()
        return rng.generator(self.seed or 0, purpose, *rank)

    @property
    def pace(self) -> str:
        """What `samestep run` sees of the ranks' pace, on rank 0: "waiting 31%  slowest rank 2 (1.4x)".

        The mean share of a step in which a rank waits for others, and the rank that they wait for, if one is slower;
        "" on other ranks, under other launchers, in a world of one and in the first seconds.
        """
        return control.pace()

    def log(self, **values: float | torch.Tensor) -> None:
        """Keeps numbers of the step that was finished last, for `samestep report`, `samestep watch` and TensorBoard.

        Each rank keeps its own, and nothing is communicated: `batches.loss` and what `evaluate` returns are the same
        on all. A tensor on a GPU is waited for.

        Args:
            values: names and numbers; a tensor must have one element.

        Raises:
            UsageError: a value is no number.

        Example:
            >>> import samestep
            >>> with samestep.world() as world:
            ...     world.log(loss=0.25, accuracy=0.9)
        """
        self._metrics.log(values)

    def close(self) -> None:
        """Destroys the process group; called on every way out, more than once does no harm.

        Users of the group release it first: when DistributedDataParallel's reducer is its last owner, the reducer's
        destructor joins gloo's thread while holding the interpreter lock, and the process never ends.
        """
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        with contextlib.ExitStack() as last:  # every user releases, whatever another one raises
            last.callback(self.release_groups)
            last.callback(self._metrics.close)
            if self._timeline is not None:
                last.callback(self._timeline.end, self._error)
            for user in reversed(self._live_users()):
                last.callback(user.release)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a copy of a model is in the same world

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = error
        self.close()

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.device}, {self.backend or 'alone'})"


def world(
    *,
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    device: torch.device | str | None = None,
    pipeline: int = 1,
    virtual_ranks: int | None = None,
    seed: int | None = 0,
    deterministic: bool = False,
    timeout: float | timedelta = 1800.0,
    join_timeout: float | timedelta = 300.0,
    run_dir: str | Path | None = None,
    tensorboard: str | Path | None = None,
) -> World:
    """Joins the other ranks, however they were started, and returns the world; alone it is a world of one.

    Collective: every rank must call it.

    Args:
        backend: "gloo", "nccl", "samestep" (gloo with faster all-reduces, on CPUs), "mpi" (over mpi4py, for ranks that
            mpiexec or srun has started) or another that torch knows; by default what suits device and network.
        init_method: "env://", "tcp://host:port" or "file:///path"; by default what the launcher set, be it
            `samestep run`, torchrun, srun or mpiexec.
        rank: this rank's number, where no launcher says it.
        size: the number of ranks, likewise.
        device: by default the GPU of this local rank if there is one, else the CPU.
        pipeline: the number of stages of a replica; `size` must be a multiple of it, or 1: a process alone holds all
            stages.
        virtual_ranks: cuts every step into so many slices, computed alike on any number of ranks that divides it, so
            that a run on 1, 2, 4, … ranks gives the same bits and may stop on one number and go on with another. A
            power of two. Each rank computes its slices one after another, on one CPU thread (a script may call
            torch.set_num_threads, alike on every number of ranks), and `deterministic` is implied on a GPU.
        seed: seeds Python's, NumPy's and torch's global generators, alike on every rank so that models start
            alike; `replicate` then gives each rank its own stream. None leaves them alone.
        deterministic: asks torch and cuDNN for bit-reproducible algorithms; see
            :func:`samestep.runtime.rng.use_deterministic_algorithms` for the price.
        timeout: seconds a collective may take.
        join_timeout: seconds to wait for the other ranks.
        run_dir: where files of the run belong; by default what `samestep run` chose. Where something else has started
            the ranks, they write there what `samestep report` and `samestep watch` show.
        tensorboard: a folder for TensorBoard's files, into which rank 0 writes what it gives to :meth:`World.log`;
            needs the extra `track`.

    Raises:
        RankVariablesError: the launcher's variables are half set or contradictory.
        BackendError: the backend is unknown, not built in, or cannot serve the device.
        DeviceError: two ranks would share a GPU.
        RendezvousError: the others did not come, or the address is wrong or stale.

    Example:
        >>> import samestep
        >>> with samestep.world() as world:
        ...     print(world.rank, "of", world.size)
        0 of 1
    """
    if deterministic or (virtual_ranks is not None and torch.cuda.is_available()):
        rng.use_deterministic_algorithms()
    try:
        launcher_env = rankenv.read_rank_variables()
        requested = None if device is None else torch.device(device)
        if dist.is_available() and dist.is_initialized():
            membership = use_existing_group(launcher_env, requested, pipeline, _seconds(timeout))
        elif _is_alone(init_method, launcher_env, rank, size):
            membership = join_alone(requested, backend, pipeline)
        else:
            membership = join_ranks(
                init_method,
                rank,
                size,
                backend=backend,
                device=requested,
                pipeline=pipeline,
                launcher_env=launcher_env,
                timeout_s=_seconds(timeout),
                join_timeout_s=_seconds(join_timeout),
            )
    except (RankVariablesError, RendezvousError) as error:
        end_in_one_line(error)
        raise
    if seed is not None:
        rng.seed_everything(seed, "model")
    if virtual_ranks is not None:
        torch.set_num_threads(1)  # how a sum is cut among threads shows in its last bits
    folder = run_dir if run_dir is not None else rankenv.variable("SAMESTEP_RUN_DIR")
    path = None if folder is None else Path(folder)
    try:
        return World(membership, seed=seed, run_dir=path, virtual_ranks=virtual_ranks, tensorboard=tensorboard)
    except BaseException:
        membership.release_groups()
        raise


def _seconds(value: float | timedelta) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if seconds <= 0:
        raise UsageError(f"a timeout must be more than 0 seconds, and is {seconds:g}")
    return seconds


def _is_alone(init_method: str | None, env: rankenv.RankVariables | None, rank: int | None, size: int | None) -> bool:
    if init_method is not None and not init_method.startswith("env://"):
        return False
    if rank is not None or size is not None:
        return size == 1
    return env is None or env.size == 1


# --- numbers that a script logs, and the events of a rank that another launcher has started -----------------------


def start_event_log(folder: Path | None, rank: int, size: int) -> Timeline | None:
    """Starts to write events to the run directory `folder`, unless a launcher does; the caller ends it."""
    if folder is None or events.is_attached() or rankenv.variable("SAMESTEP_RUN_DIR") is not None:
        return None
    if not progress.is_attached():
        progress.attach(progress.create())
        os.register_at_fork(after_in_child=progress.detach)
        progress_notes.begin()
    os.register_at_fork(after_in_child=events.detach)
    attempt = int(rankenv.variable("TORCHELASTIC_RESTART_COUNT") or 0)
    timeline = Timeline()
    timeline.begin(RankContext(rank=rank, size=size, folder=RunDirectory(folder).logs(socket.gethostname(), attempt)))
    return timeline


class MetricLog:
    """Writes what `World.log` is given."""

    def __init__(self, tensorboard: str | Path | None, *, writes: bool) -> None:
        self._calls = 0
        self._writer: Any = None
        if tensorboard is not None and find_spec("tensorboard") is None:
            raise UsageError("world(tensorboard=…) needs tensorboard: pip install 'samestep[track]'")
        if tensorboard is not None and writes:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard))

    def log(self, values: dict[str, Any]) -> None:
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._calls += 1
        progress.log_values({name: value if value - value == 0 else str(value) for name, value in numbers.items()})
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, progress.finished_steps() or self._calls)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk ends no training
                self._writer.close()


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)  # torch warns of a loss with its graph
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        given = f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
        raise UsageError(f"log({name}=…) takes a number or a tensor of one element, not {given}") from error
