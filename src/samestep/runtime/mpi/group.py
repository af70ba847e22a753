"""The process group `mpi` of torch.distributed, over mpi4py.

    dist.init_process_group("mpi")                        in a script that `mpiexec -n 4 samestep run` has started
    dist.init_process_group("cpu:mpi,cuda:nccl")          another backend for the other device's tensors
    dist.new_group([0, 2], backend="mpi", pg_options={"waiting": "polling"})

C++ looks for overrides of a process group's methods while it holds Python's lock, and for some it does not look at
all; so both the old names and the new ones are here, and all that torch.distributed calls. Collectives take turns in
a queue (:mod:`samestep.runtime.process_group.work`), each queue with a communicator of its own; point to point does
not.
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
from samestep.runtime.mpi.collectives import Collectives, equal_parts, split_rows
from samestep.runtime.mpi.operations import (
    LIVENESS_INTERVAL_S,
    Message,
    PointToPoint,
    Poller,
    Waiting,
    WatchedWork,
    begin_event,
    is_better_blocking,
)
from samestep.runtime.mpi.shutdown import ShutdownProtocol, shutdown_protocol
from samestep.runtime.mpi.tensors import check_reducible, copy_back, on_host, record_events, to_host
from samestep.runtime.process_group.work import OperationQueues, PendingWork

QUEUES = 1000  # tags of communicators: so many queues a group can have


def _routed(method: Callable[..., Any]) -> Any:
    """Passes a call on whose tensors are on a device that another backend serves."""

    @functools.wraps(method)
    def call(self: MpiGroup, *args: Any, **named: Any) -> Any:
        other = self.others.get(_device(args)) if self.others else None
        return method(self, *args, **named) if other is None else getattr(other, method.__name__)(*args, **named)

    return call


def _device(given: Any) -> str:
    """Returns the kind of device of the first tensor in lists of lists."""
    if isinstance(given, Tensor):
        return given.device.type
    if isinstance(given, list | tuple):
        return next(filter(None, map(_device, given)), "")
    return ""


class MpiGroup(dist.ProcessGroup):
    """A process group over MPI; made by torch.distributed, on every rank of the group.

    `names` are the members' numbers in the world, in the group's order. `options` are {"waiting": "blocking" or
    "polling"}, or None for what suits this host's cores; `others` are by kind of device what serves its tensors.
    """

    supports_coalescing = supports_splitting = False  # torch asks a group for its backend, and that for these

    def __init__(
        self,
        mpi: Any,
        names: Sequence[int],
        timeout_s: float,
        options: Mapping[str, str] | None,
        others: dict[str, dist.ProcessGroup],
    ) -> None:
        world = mpi.COMM_WORLD
        super().__init__(names.index(world.rank), len(names))  # type: ignore[call-arg]  # the only form for a subclass
        self.others = others
        self._name = self._description = ""
        self._mpi = mpi
        self._names = tuple(names)
        self._timeout_s = timeout_s
        self._protocol: ShutdownProtocol = shutdown_protocol(mpi)
        self._members = world.Create_group(world.group.Incl(list(names)), _tag_of(names))
        self._blocking = is_better_blocking(mpi, self._members, options)
        self._for_messages = self._communicator(QUEUES)
        self._point_to_point: PointToPoint | None = None
        self._watchdog = Poller("mpi watchdog", LIVENESS_INTERVAL_S, LIVENESS_INTERVAL_S)
        self._lock = threading.Lock()
        self._queues = OperationQueues("mpi", names)
        self._collectives = {0: self._make_collectives(0)}
        self._error: PeerError | None = None
        self._abandoned: list[Tensor] = []  # that MPI may write to as long as the process lives

    # --- names: C++ keeps them in a backend, and a group of Python's has none; without them functional collectives,
    # DTensor and FSDP say "ProcessGroup name not set" ---

    def getBackendName(self) -> str:  # noqa: N802  (C++ asks for it)
        return "mpi"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._description = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name: Any = property(getGroupName)
    group_desc: Any = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> Any:
        """Returns what serves a device's tensors: from torch 2.14 on batch_isend_irecv asks every group."""
        other = self.others.get(torch.device(device).type)
        return self if other is None else other._get_backend(device)  # noqa: SLF001

    # --- reductions ---

    @_routed
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        op = _operation(opts)
        return self._in_place(
            "all_reduce", lambda collectives, each: collectives.all_reduce(each, op), tensors, opts, op
        )

    allreduce_coalesced = allreduce

    @_routed
    def reduce(self, tensors: Any, opts: Any) -> Any:
        op, root = _operation(opts), opts.rootRank
        return self._in_place("reduce", lambda collectives, each: collectives.reduce(each, op, root), tensors, opts, op)

    @_routed
    def reduce_scatter(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        op = _operation(opts)

        def run(collectives: Collectives) -> None:
            for mine, each in zip(into, tensors, strict=True):
                with on_host(mine) as (values,):
                    collectives.reduce_scatter(values, [to_host(part) for part in each], op)

        return self._issue("reduce_scatter", run, into, opts, op, given=tensors[0])

    @_routed
    def reduce_scatter_single(self, into: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([into], [equal_parts(tensor, self.size())], opts)

    @_routed
    def reduce_scatter_single_coalesced(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        return self.reduce_scatter(into, [equal_parts(tensor, self.size()) for tensor in tensors], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- what only moves ---

    @_routed
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        root = 0 if opts is None else opts.rootRank
        return self._in_place("broadcast", lambda collectives, each: collectives.broadcast(each, root), tensors, opts)

    @_routed
    def allgather(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        def run(collectives: Collectives) -> None:
            for rows, mine in zip(into, tensors, strict=True):
                collectives.all_gather_each(rows, mine)

        return self._issue("all_gather", run, [row for rows in into for row in rows], opts, given=tensors)

    @_routed
    def all_gather_single(self, into: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([into], [tensor], opts)

    @_routed
    def all_gather_single_coalesced(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        def run(collectives: Collectives) -> None:
            for rows, mine in zip(into, tensors, strict=True):
                with on_host(rows) as (values,):
                    collectives.all_gather(values, to_host(mine))

        return self._issue("all_gather", run, into, opts, given=tensors)

    def allgather_coalesced(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        """Gives all ranks what each has, of several tensors: into[rank][tensor]."""
        return self.allgather([[rows[place] for rows in into] for place in range(len(tensors))], tensors, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_routed
    def gather(self, into: Any, tensors: Any, opts: Any) -> Any:
        root, mine = opts.rootRank, tensors[0]

        def run(collectives: Collectives) -> None:
            values = to_host(mine)
            rows = torch.empty(self.size() * values.numel(), dtype=values.dtype) if self.rank() == root else None
            collectives.gather(rows, values, root)
            if rows is not None:
                for one, row in zip(into[0], rows.view(self.size(), -1), strict=True):
                    copy_back(one, row)

        return self._issue("gather", run, into[0] if into else [], opts, given=tensors)

    @_routed
    def scatter(self, into: Any, tensors: Any, opts: Any) -> Any:
        root, mine = opts.rootRank, into[0]

        def run(collectives: Collectives) -> None:
            sent = [to_host(part).view(-1) for part in tensors[0]] if self.rank() == root else []
            with on_host(mine) as (values,):
                collectives.scatter(values, torch.cat(sent) if sent else None, root)

        return self._issue("scatter", run, into, opts, given=tensors[0] if tensors else into)

    @_routed
    def alltoall(self, into: Any, tensors: Any, opts: Any = None) -> Any:
        def run(collectives: Collectives) -> None:
            with on_host(*into) as values:
                collectives.exchange(dict(enumerate(map(to_host, tensors))), dict(enumerate(values)))

        return self._issue("all_to_all", run, into, opts, given=tensors)

    @_routed
    def all_to_all_single(
        self, into: Tensor, tensor: Tensor, into_splits: Any = None, splits: Any = None, opts: Any = None
    ) -> Any:
        def run(collectives: Collectives) -> None:
            sent = split_rows(to_host(tensor), splits, self.size())
            with on_host(into) as (values,):
                received = split_rows(values, into_splits, self.size())
                collectives.exchange(dict(enumerate(sent)), dict(enumerate(received)))

        return self._issue("all_to_all_single", run, [into], opts, given=[tensor])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Waits for all ranks, and for what was issued before. Collective."""
        return self._issue("barrier", Collectives.barrier, [], opts)

    # --- point to point ---

    @_routed
    def send(self, tensors: Any, to: int, tag: int = 0) -> Message:
        return self._messages(tensors).send(tensors[0], to, tag)

    @_routed
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Message:
        return self._messages(tensors).receive(tensors[0], source, tag)

    @_routed
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Message:
        return self._messages(tensors).receive_any(tensors[0], tag)

    def _messages(self, tensors: Sequence[Tensor]) -> PointToPoint:
        record_events(tensors)()
        self._queues.check_open()
        with self._lock:
            if self._point_to_point is None:
                self._point_to_point = PointToPoint(
                    self._mpi, self._for_messages, self._name, self._names, self._protocol, self._timeout_s
                )
            return self._point_to_point

    # --- turns ---

    def _issue(
        self,
        what: str,
        call: Callable[[Collectives], None],
        tensors: Sequence[Tensor],
        opts: Any,
        op: str | None = None,
        given: Sequence[Tensor] | None = None,
    ) -> PendingWork:
        """Runs a collective after all that was issued before on this queue.

        `tensors` hold the result, `op` is that of a reduction, `given` this rank's input, where that is not `tensors`.
        """
        for tensor in tensors if op is not None else ():
            check_reducible(tensor, str(op))
        depth, queue = self._queues.current()
        wait_for_gpu = record_events(tensors)
        key = f"{self._name} {depth}"
        number = self._protocol.count(key)
        check = functools.partial(self._protocol.check, what, dict.fromkeys(self._names, (key, number)))
        waited_for = f"{what} (call {number} of this group) for the other ranks"
        end_event = begin_event(what, tensors if given is None else given)

        def run() -> None:
            try:
                wait_for_gpu()
                self._run(lambda: call(self._collectives_of(depth, check, waited_for)), tensors)
            finally:
                if end_event is not None:
                    end_event()

        in_thread = self._blocking or end_event is not None or getattr(opts, "asyncOp", True)
        work = queue.issue(run, tensors, at_once=not in_thread)
        if self._blocking:
            self._watchdog.add(WatchedWork(work, check, self._timeout_s, waited_for))
        return work

    def _run(self, call: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        """After an error the ranks are out of step, and MPI may still write: all later calls end in the same error."""
        if self._error is not None:
            raise self._error
        try:
            call()
        except PeerError as error:
            self._error = error
            self._abandoned.extend(tensors)
            raise

    def _in_place(
        self, what: str, call: Callable[[Collectives, Tensor], None], tensors: Any, opts: Any, op: str | None = None
    ) -> PendingWork:
        def run(collectives: Collectives) -> None:
            for tensor in tensors:
                with on_host(tensor) as (values,):
                    call(collectives, values)

        return self._issue(what, run, tensors, opts, op)

    def _collectives_of(self, depth: int, check: Callable[[], None], what: str) -> Collectives:
        """Returns the collectives of a queue; called by that queue alone, one after another."""
        if depth not in self._collectives:
            self._collectives[depth] = self._make_collectives(depth)
        collectives = self._collectives[depth]
        collectives.waiting.check, collectives.waiting.what = check, what
        return collectives

    def _make_collectives(self, depth: int) -> Collectives:
        waiting = Waiting(blocking=self._blocking, timeout_s=self._timeout_s, check=lambda: None, what="MPI")
        return Collectives(self._mpi, self._communicator(depth), waiting)

    def _communicator(self, number: int) -> Any:
        """Returns a communicator of the members, made by them alone; `number` tells it from others made meanwhile."""
        made = self._members.Create_group(self._members.group, number)
        made.Set_errhandler(self._mpi.ERRORS_RETURN)  # mpi4py raises them
        return made

    def shutdown(self) -> None:
        """Ends the group's threads when they have run what was issued; `destroy_process_group` calls it."""
        self._queues.close()
        if self._point_to_point is not None:
            self._point_to_point.close()

    abort = shutdown  # torch calls it after a failure


def _operation(opts: Any) -> str:
    return "sum" if opts is None else str(opts.reduceOp.op.name).lower()


def _tag_of(names: Sequence[int]) -> int:
    """Returns a number that distinguishes groups which are made at the same time."""
    return zlib.crc32(repr(tuple(names)).encode()) % 30000  # every MPI has tags up to 32767
