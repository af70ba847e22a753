"""The process group `samestep` of torch.distributed: gloo's, with the all-reduce of this project.

    dist.init_process_group("samestep")                                       after `import samestep`
    dist.init_process_group("samestep", pg_options={"algorithm": "ring"})     this algorithm, also on one host

What is done by shared memory, by plans and by gloo: docs/process-group.md. Plans are not the default on several hosts:
their messages are sent from Python, and small ones take three to four times as long as gloo's.

PyTorch lets Python subclass `ProcessGroup`, with a trap: C++ looks for an override of each collective while it holds
Python's lock, and where it finds none it goes on to gloo without releasing it. gloo's thread may hold gloo's own lock
at that moment, and wait for Python's to release the last tensor of the collective before: a deadlock. So every
collective that C++ looks for has an override here, if only one that calls a plain group of gloo's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from samestep.collectives.counters import has_total_store_order
from samestep.collectives.plan import Operation
from samestep.collectives.shared_memory import divide_
from samestep.errors import SamestepError, UsageError
from samestep.runtime.backends import number_collectives
from samestep.runtime.process_group.algorithms import PlannedCollectives, operations
from samestep.runtime.process_group.shared_memory import SERVED, GroupInfo, SharedMemoryAllReduce, gather_host_map
from samestep.runtime.process_group.work import OperationQueues, PendingWork

CHEAPEST = "cheapest"
PLANNED = ("sum", "avg")  # the reductions of plans; shared memory does all of SERVED


class Collectives:
    """Runs the collectives of one queue; all ranks make the same calls in the same order.

    After an error the ranks are out of step, and the next sum would be one of mismatched tensors. So an error is kept,
    and every later call ends in it too. `algorithm` is how the names of the plans begin; None for shared memory.
    """

    def __init__(self, store: Store, info: GroupInfo, algorithm: str | None) -> None:
        self._store = store
        self._info = info
        self._algorithm = algorithm or ""
        in_memory = algorithm is None and info.host_map.is_one_host and has_total_store_order()
        self.memory = SharedMemoryAllReduce.open(store, info) if in_memory else None
        self._error: SamestepError | None = None

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:
        for tensor in tensors:
            self._check(self._all_reduce, tensor.detach(), op)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        if self.memory is not None:
            self.memory.all_reduce(tensor, op)
            return
        flat = tensor.reshape(-1)
        self._plans.run("all_reduce", flat)
        if op == "avg":
            divide_(flat, self._info.size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        flat = tensor.detach().reshape(-1)
        self._check(self._plans.run, "broadcast", flat, root)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))

    def all_gather(self, into: Sequence[Tensor], mine: Tensor) -> None:
        rows = self._rows("all_gather", mine)
        rows[self._info.rank, : mine.numel()] = mine.detach().reshape(-1)
        self._check(self._plans.run, "all_gather", rows.view(-1))
        for one, row in zip(into, rows, strict=True):
            one.detach().copy_(row[: mine.numel()].view_as(one))

    def reduce_scatter(self, into: Tensor, parts: Sequence[Tensor], op: str) -> None:
        rows = self._rows("reduce_scatter", into)
        for row, part in zip(rows, parts, strict=True):
            row[: part.numel()] = part.detach().reshape(-1)
        self._check(self._plans.run, "reduce_scatter", rows.view(-1))
        mine = rows[self._info.rank, : into.numel()]
        if op == "avg":
            divide_(mine, self._info.size)
        into.detach().copy_(mine.view_as(into))

    def _rows(self, operation: Operation, like: Tensor) -> Tensor:
        """Memory with a row for each rank, of as many elements as the plan divides evenly into blocks."""
        ranks = self._info.size
        each = self._plans.plan(operation, ranks * like.nbytes).blocks // ranks
        return like.new_zeros(ranks, -(-like.numel() // each) * each)

    @cached_property
    def _plans(self) -> PlannedCollectives:
        return PlannedCollectives(self._store, self._info, self._algorithm)

    def _check(self, call: Callable[..., None], *args: Any) -> None:
        if self._error is not None:
            raise self._error
        try:
            call(*args)
        except SamestepError as error:
            self._error = error
            raise

    def leave(self) -> None:
        if self.memory is not None:
            self.memory.leave()


def _by_gloo(name: str) -> Callable[..., Any]:
    def call(self: SamestepGroup, *args: Any, **named: Any) -> Any:
        return getattr(self.gloo, name)(*args, **named)

    call.__name__ = name
    return call


class SamestepGroup(dist.ProcessGroup):
    """A process group; made by torch.distributed, which gives it its `settings`, on every rank of the group.

    `options` are {"algorithm": how the names of its plans begin, or "cheapest"}, or None.
    """

    def __init__(self, settings: Any, options: Mapping[str, str] | None = None) -> None:
        rank, size = settings.group_rank, settings.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only form that a subclass can use
        self.gloo = self._gloo_group(settings)
        self._algorithm = _algorithm(options)
        names = tuple(settings.global_ranks_in_group) or tuple(range(size))
        self._store = PrefixStore("samestep", settings.store)
        host_map = gather_host_map(self._store, rank, size)
        self._info = GroupInfo(rank, names, host_map, settings.timeout.total_seconds())
        self._operations = set() if self._algorithm is None else operations(self._algorithm, self._info)
        self._queues = OperationQueues(f"samestep {settings.group_id}", names)
        self._collectives: dict[int, Collectives] = {}
        self._in_memory = self._collectives_of(0).memory is not None

    def _gloo_group(self, settings: Any) -> dist.ProcessGroup:
        """Returns a group that is gloo's alone; C++ finds the same backend below this group."""
        rank, size = settings.group_rank, settings.group_size
        backend: Any = dist.ProcessGroupGloo(PrefixStore("gloo", settings.store), rank, size, settings.timeout)
        number_collectives(backend)
        plain = dist.ProcessGroup(settings.store, rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for group in (plain, self):
            group._register_backend(torch.device("cpu"), kind, backend)  # noqa: SLF001
            group._set_default_backend(kind)  # noqa: SLF001
        return plain

    def getBackendName(self) -> str:  # noqa: N802  (C++ asks for it)
        return "samestep"

    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        if len(tensors) > 1:  # gloo would add the tensors of a list to each other
            return self.gloo.allreduce(*_given(tensors, opts), **named)
        return self._all_reduce(self.gloo.allreduce, tensors, opts, **named)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._all_reduce(self.gloo.allreduce_coalesced, tensors, opts)

    def _all_reduce(self, by_gloo: Callable[..., Any], tensors: Any, opts: Any, **named: Any) -> Any:
        if not isinstance(opts, dist.AllreduceOptions) or not self._serves("all_reduce", tensors, opts):
            return by_gloo(*_given(tensors, opts), **named)
        op = _operation(opts)
        return self._issue(lambda collectives: collectives.all_reduce(tensors, op), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        if not isinstance(opts, dist.BroadcastOptions) or not self._plans("broadcast", tensors):
            return self.gloo.broadcast(*_given(tensors, opts), **named)
        tensor, root = tensors[0], opts.rootRank
        return self._issue(lambda collectives: collectives.broadcast(tensor, root), tensors, opts)

    def allgather(self, into: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        if not self._plans("all_gather", tensors) or not _same_kind(into[0], tensors[0]):
            return self.gloo.allgather(*_given(into, tensors, opts), **named)
        rows, tensor = into[0], tensors[0]
        return self._issue(lambda collectives: collectives.all_gather(rows, tensor), rows, opts)

    def reduce_scatter(self, into: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        serves = isinstance(opts, dist.ReduceScatterOptions) and self._serves("reduce_scatter", into, opts)
        if not serves or not _same_kind(tensors[0], into[0]):
            return self.gloo.reduce_scatter(*_given(into, tensors, opts), **named)
        tensor, parts, op = into[0], tensors[0], _operation(opts)
        return self._issue(lambda collectives: collectives.reduce_scatter(tensor, parts, op), into, opts)

    def barrier(self, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Waits for all ranks, and for what was issued before. Collective."""
        work = self.gloo.barrier(*_given(opts), **named)
        _, queue = self._queues.current()
        return queue.issue(work.wait, [], at_once=not getattr(opts, "asyncOp", True))

    # what C++ looks for, and what gloo does
    all_gather_single_coalesced = _by_gloo("all_gather_single_coalesced")
    all_to_all_single = _by_gloo("all_to_all_single")
    allgather_into_tensor_coalesced = _by_gloo("allgather_into_tensor_coalesced")
    alltoall_base = _by_gloo("alltoall_base")
    recv = _by_gloo("recv")
    reduce_scatter_single_coalesced = _by_gloo("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _by_gloo("reduce_scatter_tensor_coalesced")
    send = _by_gloo("send")

    def _serves(self, operation: Operation, tensors: Sequence[Tensor], opts: Any) -> bool:
        """Whether this class does a reduction, and not gloo; the same on all ranks that make the same call."""
        op = _operation(opts)
        known = op in (SERVED if self._in_memory else PLANNED) and all(_is_dense(each, SERVED[op]) for each in tensors)
        if self._algorithm is None:
            return known and operation == "all_reduce" and self._in_memory and self._info.size > 1
        return known and operation in self._operations

    def _plans(self, operation: Operation, tensors: Sequence[Tensor]) -> bool:
        return operation in self._operations and len(tensors) == 1 and _is_dense(tensors[0])

    def _issue(self, call: Callable[[Collectives], None], tensors: Sequence[Tensor], opts: Any) -> PendingWork:
        depth, queue = self._queues.current()
        at_once = not getattr(opts, "asyncOp", True)
        return queue.issue(lambda: call(self._collectives_of(depth)), tensors, at_once=at_once)

    def _collectives_of(self, depth: int) -> Collectives:
        """Returns what runs the collectives of a queue; called by that queue alone."""
        self._queues.check_open()
        if depth not in self._collectives:
            store = PrefixStore(f"queue {depth}", self._store)
            self._collectives[depth] = Collectives(store, self._info, self._algorithm)
        return self._collectives[depth]

    def shutdown(self) -> None:
        """Tells the others that this rank has left; `destroy_process_group` calls it."""
        self._queues.close()
        collectives, self._collectives = self._collectives, {}
        for each in collectives.values():
            each.leave()

    abort = shutdown  # torch calls it after a failure


def _given(*args: Any) -> list[Any]:
    """Returns the arguments that were given; the last may be left out."""
    return [each for each in args if each is not None]


def _operation(opts: Any) -> str:
    found: str = opts.reduceOp.op.name.lower()
    return found


def _is_dense(tensor: Tensor, dtypes: Sequence[torch.dtype] | None = None) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and (dtypes is None or tensor.dtype in dtypes)


def _same_kind(tensors: Sequence[Tensor], like: Tensor) -> bool:
    return all(_is_dense(each, [like.dtype]) and each.numel() == like.numel() for each in tensors)


def _algorithm(options: Mapping[str, str] | None) -> str | None:
    given = {} if options is None else dict(options)
    algorithm = given.pop("algorithm", None)
    if given:
        raise UsageError(f"the backend samestep has no option {', '.join(map(repr, given))}: it has 'algorithm'")
    return "" if algorithm == CHEAPEST else algorithm
