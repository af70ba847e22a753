"""The process group `samestep` of torch.distributed: gloo's, with the all-reduce of this project.

    dist.init_process_group("samestep")                                       after `import samestep`
    dist.init_process_group("samestep", pg_options={"algorithm": "ring"})     this algorithm, also on one host

    all-reduce on one host      in shared memory
    with an algorithm           all-reduce, broadcast, reduce-scatter and all-gather by its plans, where it has any;
                                "cheapest" takes those that suit the links, which are measured
    everything else             gloo: other collectives, several hosts, sparse tensors, dtypes that are not added here

Plans are not the default on several hosts: their messages are sent from Python, and where bytes are few they take
three to four times as long as gloo does.

A collective that its caller waits for is carried out by the calling thread, others by a thread of the group, in the
order in which they were issued (:mod:`samestep.runtime.issuing`).

PyTorch lets Python subclass `ProcessGroup`, with a trap: C++ looks for an override of each collective with Python's
lock in its hand, and where it finds none it goes on to gloo without letting go. gloo's thread may hold gloo's own lock
at that moment, and wait for Python's to release the last tensor of the collective before. Neither ever moves again.
So every collective that C++ looks for has an override here, if only one that hands on to a plain group of gloo's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from samestep.collectives.plan import Operation
from samestep.errors import UsageError
from samestep.runtime.backend import number_collectives
from samestep.runtime.carrier import Carrier
from samestep.runtime.group_memory import SERVED, Place, meet
from samestep.runtime.group_messages import operations
from samestep.runtime.issuing import Lanes, Task

__all__: list[str] = []

CHEAPEST = "cheapest"
ADDED = ("sum", "avg")  # what plans do; shared memory does all of SERVED


def _by_gloo(name: str) -> Callable[..., Any]:
    def handed_on(self: SamestepGroup, *args: Any, **named: Any) -> Any:
        return getattr(self.gloo, name)(*args, **named)

    handed_on.__name__ = name
    return handed_on


class SamestepGroup(dist.ProcessGroup):
    """A process group; made by torch.distributed, on every rank of the group.

    Args:
        told: rank, size, store, timeout and name.
        options: {"algorithm": how the names of its plans begin, or "cheapest"}, or None.

    Raises:
        UsageError: an option, or the algorithm, is unknown.
    """

    def __init__(self, told: Any, options: Mapping[str, str] | None = None) -> None:
        rank, size = told.group_rank, told.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only form that a subclass can use
        self._name = f"samestep {told.group_id}"
        self.gloo = self._plain(told)
        algorithm = _algorithm(options)
        names = tuple(told.global_ranks_in_group) or tuple(range(size))
        self._store = PrefixStore("samestep", told.store)
        self._place = Place(rank, names, meet(self._store, rank, size), told.timeout.total_seconds())
        self._operations = set() if algorithm is None else operations(algorithm, self._place)
        self._algorithm = algorithm
        self._lanes = Lanes(self._name, names)
        self._carriers: dict[int, Carrier] = {}
        self._in_memory = self._carrier(0).memory is not None

    def _plain(self, told: Any) -> dist.ProcessGroup:
        """Returns a group that is gloo's alone; C++ finds the same one below this one."""
        backend: Any = dist.ProcessGroupGloo(
            PrefixStore("gloo", told.store), told.group_rank, told.group_size, told.timeout
        )
        number_collectives(backend)
        plain = dist.ProcessGroup(told.store, told.group_rank, told.group_size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for group in (plain, self):
            group._register_backend(torch.device("cpu"), kind, backend)  # noqa: SLF001
            group._set_default_backend(kind)  # noqa: SLF001
        return plain

    def getBackendName(self) -> str:  # noqa: N802  (C++ asks for it)
        """Returns "samestep"."""
        return "samestep"

    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Adds a tensor over the ranks, in place. Collective."""
        serves = isinstance(opts, dist.AllreduceOptions) and self._serves("all_reduce", tensors, opts)
        if not serves or len(tensors) > 1:  # gloo would add the tensors of a list to each other
            return self.gloo.allreduce(*_given(tensors, opts), **named)
        op = _name(opts)
        return self._issue(lambda carrier: carrier.all_reduce(tensors, op), tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Adds several tensors over the ranks, in place. Collective."""
        if not isinstance(opts, dist.AllreduceOptions) or not self._serves("all_reduce", tensors, opts):
            return self.gloo.allreduce_coalesced(*_given(tensors, opts))
        op = _name(opts)
        return self._issue(lambda carrier: carrier.all_reduce(tensors, op), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Gives all ranks what one has. Collective."""
        if not isinstance(opts, dist.BroadcastOptions) or not self._plans("broadcast", tensors):
            return self.gloo.broadcast(*_given(tensors, opts), **named)
        tensor, root = tensors[0], opts.rootRank
        return self._issue(lambda carrier: carrier.broadcast(tensor, root), tensors, opts)

    def allgather(self, into: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Gives all ranks what each has. Collective."""
        if not self._plans("all_gather", tensors) or not _alike(into[0], tensors[0]):
            return self.gloo.allgather(*_given(into, tensors, opts), **named)
        rows, tensor = into[0], tensors[0]
        return self._issue(lambda carrier: carrier.all_gather(rows, tensor), rows, opts)

    def reduce_scatter(self, into: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Gives each rank the sum of the ranks' parts for it. Collective."""
        serves = isinstance(opts, dist.ReduceScatterOptions) and self._serves("reduce_scatter", into, opts)
        if not serves or not _alike(tensors[0], into[0]):
            return self.gloo.reduce_scatter(*_given(into, tensors, opts), **named)
        tensor, parts, op = into[0], tensors[0], _name(opts)
        return self._issue(lambda carrier: carrier.reduce_scatter(tensor, parts, op), into, opts)

    def barrier(self, opts: Any = None, **named: Any) -> Any:  # type: ignore[override]
        """Waits for all ranks, and for what was issued before. Collective."""
        work = self.gloo.barrier(*_given(opts), **named)
        _, lane = self._lanes.here()
        return lane.issue(work.wait, [], at_once=not getattr(opts, "asyncOp", True))

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
        """Whether we do it, and not gloo; the same on all ranks that call the same."""
        op = _name(opts)
        ours = op in (SERVED if self._in_memory else ADDED) and all(_is_plain(each, SERVED[op]) for each in tensors)
        if self._algorithm is None:
            return ours and operation == "all_reduce" and self._in_memory and self._place.size > 1
        return ours and operation in self._operations

    def _plans(self, operation: Operation, tensors: Sequence[Tensor]) -> bool:
        return operation in self._operations and len(tensors) == 1 and _is_plain(tensors[0])

    def _issue(self, act: Callable[[Carrier], None], tensors: Sequence[Tensor], opts: Any) -> Task:
        level, lane = self._lanes.here()
        at_once = not getattr(opts, "asyncOp", True)
        return lane.issue(lambda: act(self._carrier(level)), tensors, at_once=at_once)

    def _carrier(self, level: int) -> Carrier:
        """Returns what carries the lane's collectives out; called by the lane alone."""
        self._lanes.check_open()
        if level not in self._carriers:
            self._carriers[level] = Carrier(PrefixStore(f"lane {level}", self._store), self._place, self._algorithm)
        return self._carriers[level]

    def shutdown(self) -> None:
        """Tells the others that this rank has left; `destroy_process_group` calls it."""
        self._lanes.close()
        carriers, self._carriers = self._carriers, {}
        for carrier in carriers.values():
            carrier.leave()

    def abort(self) -> None:
        """The same, in haste."""
        self.shutdown()


def _given(*args: Any) -> list[Any]:
    """What was given of some arguments, the last of which may be left out."""
    return [each for each in args if each is not None]


def _name(opts: Any) -> str:
    """Returns what the operation is called: "sum", "avg", ..."""
    found: str = opts.reduceOp.op.name.lower()
    return found


def _is_plain(tensor: Tensor, dtypes: Sequence[torch.dtype] | None = None) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and (dtypes is None or tensor.dtype in dtypes)


def _alike(tensors: Sequence[Tensor], like: Tensor) -> bool:
    return all(_is_plain(each, [like.dtype]) and each.numel() == like.numel() for each in tensors)


def _algorithm(options: Mapping[str, str] | None) -> str | None:
    """Returns the algorithm asked for.

    Raises:
        UsageError: an option is unknown.
    """
    given = {} if options is None else dict(options)
    algorithm = given.pop("algorithm", None)
    if given:
        raise UsageError(f"the backend samestep has no option {', '.join(map(repr, given))}: it has 'algorithm'")
    return "" if algorithm == CHEAPEST else algorithm
