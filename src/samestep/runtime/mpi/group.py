"""The process group `mpi` of torch.distributed, over mpi4py.

    dist.init_process_group("mpi")                        in a script that `mpiexec -n 4 samestep run` has started
    dist.init_process_group("cpu:mpi,cuda:nccl")          another backend for the other device's tensors
    dist.new_group([0, 2], backend="mpi", pg_options={"waiting": "polling"})

C++ looks for overrides of a process group's methods with Python's lock in its hand, and some it does not look for at
all; so both the old names and the new ones are here, and all that torch.distributed calls. PyTorch's own MPI group
hands every call to one thread, in which it blocks. Here collectives take their turns on a lane
(:mod:`samestep.runtime.issuing`), each lane with a communicator of its own; point to point takes none.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import PeerError
from samestep.runtime.issuing import Lanes, Task
from samestep.runtime.mpi import parts, profiled, staging
from samestep.runtime.mpi.calls import Calls
from samestep.runtime.mpi.datatypes import check_reducible
from samestep.runtime.mpi.ending import Ending, ending_of
from samestep.runtime.mpi.guard import Guard
from samestep.runtime.mpi.messages import Message, Messages
from samestep.runtime.mpi.named import Named
from samestep.runtime.mpi.sharing import is_better_blocking
from samestep.runtime.mpi.waiting import Waiting

__all__: list[str] = []

LANES = 1000  # tags of communicators: so many lanes a group can have


def _here(method: Callable[..., Any]) -> Any:
    """Hands a call on whose tensors lie on a device that another backend serves."""

    @functools.wraps(method)
    def routed(self: MpiGroup, *args: Any, **named: Any) -> Any:
        other = self.others.get(_device(args)) if self.others else None
        return method(self, *args, **named) if other is None else getattr(other, method.__name__)(*args, **named)

    return routed


def _device(given: Any) -> str:
    """Returns the kind of device of the first tensor in lists of lists."""
    if isinstance(given, Tensor):
        return given.device.type
    if isinstance(given, list | tuple):
        return next(filter(None, map(_device, given)), "")
    return ""


class MpiGroup(Named):
    """A process group over MPI; made by torch.distributed, on every rank of the group.

    Args:
        mpi: the library.
        names: the members' numbers in the world, in the group's order.
        timeout_s: how long a collective may take.
        options: {"waiting": "blocking" or "polling"}, or None: what suits this host's cores.
        others: by kind of device, what serves its tensors instead.

    Raises:
        UsageError: an option is unknown.
    """

    def __init__(
        self,
        mpi: Any,
        names: Sequence[int],
        timeout_s: float,
        options: Mapping[str, str] | None = None,
        others: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        world = mpi.COMM_WORLD
        super().__init__(names.index(world.rank), len(names))
        self.others = dict(others or {})
        self._mpi = mpi
        self._names = tuple(names)
        self._timeout_s = timeout_s
        self._ending: Ending = ending_of(mpi)
        self._making = world.Create_group(world.group.Incl(list(names)), _tag_of(names))
        self._blocking = is_better_blocking(mpi, self._making, options)
        self._talking = self._communicator(LANES)
        self._messages: Messages | None = None
        self._guard = Guard()
        self._lock = threading.Lock()
        self._lanes = Lanes("mpi", names)
        self._calls = {0: self._make_calls(0)}
        self._failed: PeerError | None = None
        self._abandoned: list[Tensor] = []  # that MPI may write to as long as it lives

    # --- reductions ---

    @_here
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Adds tensors over the ranks, in place. Collective."""
        op = _operation(opts)
        return self._in_place("all_reduce", lambda calls, each: calls.all_reduce(each, op), tensors, opts, op)

    allreduce_coalesced = allreduce

    @_here
    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Adds a tensor over the ranks, in place on the root. Collective."""
        op, root = _operation(opts), opts.rootRank
        return self._in_place("reduce", lambda calls, each: calls.reduce(each, op, root), tensors, opts, op)

    @_here
    def reduce_scatter(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """Gives each rank the sum of the ranks' parts for it. Collective."""
        op = _operation(opts)

        def act(calls: Calls) -> None:
            for mine, each in zip(into, tensors, strict=True):
                values = staging.staged(mine)
                calls.reduce_scatter(values, [staging.staged(part) for part in each], op)
                staging.put_back(mine, values)

        return self._issue("reduce_scatter", act, into, opts, op, given=tensors[0])

    @_here
    def reduce_scatter_single(self, into: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """The same of one tensor that holds all ranks' parts."""
        return self.reduce_scatter([into], [parts.even(tensor, self.size())], opts)

    @_here
    def reduce_scatter_single_coalesced(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """The same of several tensors."""
        return self.reduce_scatter(into, [parts.even(tensor, self.size()) for tensor in tensors], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- what only moves ---

    @_here
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Gives all ranks what one has. Collective."""
        root = 0 if opts is None else opts.rootRank
        return self._in_place("broadcast", lambda calls, each: calls.broadcast(each, root), tensors, opts)

    @_here
    def allgather(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """Gives all ranks what each has; tensors may differ in length. Collective."""

        def act(calls: Calls) -> None:
            for rows, mine in zip(into, tensors, strict=True):
                parts.gather_all(calls, rows, mine, self.rank())

        return self._issue("all_gather", act, [row for rows in into for row in rows], opts, given=tensors)

    @_here
    def all_gather_single(self, into: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """The same into one tensor that holds all ranks' parts."""
        return self.all_gather_single_coalesced([into], [tensor], opts)

    @_here
    def all_gather_single_coalesced(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """The same of several tensors."""

        def act(calls: Calls) -> None:
            for rows, mine in zip(into, tensors, strict=True):
                values = staging.staged(rows)
                calls.all_gather(values, staging.staged(mine))
                staging.put_back(rows, values)

        return self._issue("all_gather", act, into, opts, given=tensors)

    def allgather_coalesced(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """Gives all ranks what each has, of several tensors: into[rank][tensor]."""
        return self.allgather([[rows[place] for rows in into] for place in range(len(tensors))], tensors, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_here
    def gather(self, into: Any, tensors: Any, opts: Any) -> Any:
        """Gives the root what each has. Collective."""
        root, mine = opts.rootRank, tensors[0]

        def act(calls: Calls) -> None:
            values = staging.staged(mine)
            rows = torch.empty(self.size() * values.numel(), dtype=values.dtype) if self.rank() == root else None
            calls.gather(rows, values, root)
            if rows is not None:
                for one, row in zip(into[0], rows.view(self.size(), -1), strict=True):
                    staging.put_back(one, row)

        return self._issue("gather", act, into[0] if into else [], opts, given=tensors)

    @_here
    def scatter(self, into: Any, tensors: Any, opts: Any) -> Any:
        """Gives each rank its part of what the root has. Collective."""
        root, mine = opts.rootRank, into[0]

        def act(calls: Calls) -> None:
            values = staging.staged(mine)
            sent = [staging.staged(part).view(-1) for part in tensors[0]] if self.rank() == root else []
            calls.scatter(values, torch.cat(sent) if sent else None, root)
            staging.put_back(mine, values)

        return self._issue("scatter", act, into, opts, given=tensors[0] if tensors else into)

    @_here
    def alltoall(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """Gives each rank its part of what every rank has; parts may differ in length. Collective."""

        def act(calls: Calls) -> None:
            values = [staging.staged(one) for one in into]
            calls.exchange(dict(enumerate(map(staging.staged, tensors))), dict(enumerate(values)))
            for one, value in zip(into, values, strict=True):
                staging.put_back(one, value)

        return self._issue("all_to_all", act, into, opts, given=tensors)

    @_here
    def all_to_all_single(
        self, into: Tensor, tensor: Tensor, into_splits: Any = None, splits: Any = None, opts: Any = None
    ) -> Any:
        """The same of one tensor cut along dim 0, evenly or as told."""

        def act(calls: Calls) -> None:
            values = staging.staged(into)
            sent = parts.cut(staging.staged(tensor), splits, self.size())
            calls.exchange(dict(enumerate(sent)), dict(enumerate(parts.cut(values, into_splits, self.size()))))
            staging.put_back(into, values)

        return self._issue("all_to_all_single", act, [into], opts, given=[tensor])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Waits for all ranks, and for what was issued before. Collective."""
        return self._issue("barrier", Calls.barrier, [], opts)

    # --- point to point ---

    @_here
    def send(self, tensors: Any, to: int, tag: int = 0) -> Message:
        """Sends a tensor to a rank of the group."""
        return self._for_messages(tensors).send(tensors[0], to, tag)

    @_here
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Message:
        """Receives a tensor from a rank of the group."""
        return self._for_messages(tensors).receive(tensors[0], source, tag)

    @_here
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Message:
        """Receives a tensor from whichever rank sends one."""
        return self._for_messages(tensors).receive_any(tensors[0], tag)

    def _for_messages(self, tensors: Sequence[Tensor]) -> Messages:
        staging.noted(tensors)()
        self._lanes.check_open()
        with self._lock:
            if self._messages is None:
                self._messages = Messages(
                    self._mpi, self._talking, self._name, self._names, self._ending, self._timeout_s
                )
            return self._messages

    # --- turns ---

    def _issue(
        self,
        what: str,
        act: Callable[[Calls], None],
        tensors: Sequence[Tensor],
        opts: Any,
        op: str | None = None,
        given: Sequence[Tensor] | None = None,
    ) -> Task:
        """Has a collective carried out after all that was issued before on this lane.

        Args:
            what: it is called.
            act: carries it out.
            tensors: that the result lies in.
            opts: what torch.distributed was told.
            op: of a reduction.
            given: what each rank brings, where that is not `tensors`.
        """
        for tensor in tensors if op is not None else ():
            check_reducible(tensor, str(op))
        level, lane = self._lanes.here()
        reached = staging.noted(tensors)
        key = f"{self._name} {level}"
        number = self._ending.count(key)
        came = dict.fromkeys(self._names, (key, number))
        check = functools.partial(self._ending.check, what, came)
        waited = f"{what} (call {number} of this group) for the other ranks"
        ended = profiled.begun(what, tensors if given is None else given)

        def carry_out() -> None:
            try:
                reached()
                self._guarded(lambda: act(self._calls_of(level, check, waited)), tensors)
            finally:
                if ended is not None:
                    ended()

        by_lane = self._blocking or ended is not None or getattr(opts, "asyncOp", True)
        task = lane.issue(carry_out, tensors, at_once=not by_lane)
        if self._blocking:
            self._guard.watch(task, check, self._timeout_s, waited)
        return task

    def _guarded(self, act: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        """After an error the ranks are out of step, and MPI may still write: all that follows ends alike."""
        if self._failed is not None:
            raise self._failed
        try:
            act()
        except PeerError as error:
            self._failed = error
            self._abandoned.extend(tensors)
            raise

    def _in_place(
        self, what: str, act: Callable[[Calls, Tensor], None], tensors: Any, opts: Any, op: str | None = None
    ) -> Task:
        def carry_out(calls: Calls) -> None:
            parts.in_place(functools.partial(act, calls), tensors)

        return self._issue(what, carry_out, tensors, opts, op)

    def _calls_of(self, level: int, check: Callable[[], None], what: str) -> Calls:
        """Returns the collectives of a lane; called by the lane alone, one after another."""
        if level not in self._calls:
            self._calls[level] = self._make_calls(level)
        calls = self._calls[level]
        calls.waiting.check, calls.waiting.what = check, what
        return calls

    def _make_calls(self, level: int) -> Calls:
        waiting = Waiting(blocking=self._blocking, timeout_s=self._timeout_s, check=lambda: None, what="MPI")
        return Calls(self._mpi, self._communicator(level), waiting)

    def _communicator(self, number: int) -> Any:
        """Returns a communicator of the members, made by them alone; `number` tells it from others made meanwhile."""
        made = self._making.Create_group(self._making.group, number)
        made.Set_errhandler(self._mpi.ERRORS_RETURN)  # mpi4py raises them
        return made

    def shutdown(self) -> None:
        """Ends the group's threads when they have done what they were given; `destroy_process_group` calls it."""
        self._lanes.close()
        if self._messages is not None:
            self._messages.close()

    def abort(self) -> None:
        """The same, in haste."""
        self.shutdown()


def _operation(opts: Any) -> str:
    """Returns what the operation is called: "sum", "avg", ..."""
    return "sum" if opts is None else str(opts.reduceOp.op.name).lower()


def _tag_of(names: Sequence[int]) -> int:
    """Tells groups apart that are made at the same time."""
    return zlib.crc32(repr(tuple(names)).encode()) % 30000  # every MPI has tags up to 32767
