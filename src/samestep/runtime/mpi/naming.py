"""Makes `mpi` mean MPI in torch.distributed, where PyTorch was built without it.

The name is taken: torch.distributed hands it to its own class, and says that PyTorch must be built from source where
there is none. Every group of every kind is made by one function of torch.distributed, `_new_process_group_helper`; it
is wrapped here, and for groups that name mpi it finds our class in that one's place. What torch says of itself,
`torch.distributed.is_mpi_available()`, stays as it is, so that nobody chooses mpi because samestep is there.

PyTorch's MPI has no store, since MPI knows the ranks. Other groups beside it need one, of gloo's say; so rank 0 serves
one, and tells its address by MPI.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from samestep.errors import BackendError

__all__: list[str] = []

MPI = "mpi"


@dataclass
class _Asked:
    """What the group that torch.distributed is making was asked for."""

    name: str
    backends: dict[str, str]
    store: Any
    rank: int
    size: int
    timeout_s: float
    options: Any


_asked: list[_Asked] = []


def make_known(distributed: ModuleType) -> None:
    """Lets torch.distributed find MPI, unless it has its own. Once for a process.

    Args:
        distributed: the module torch.distributed.
    """
    inner = distributed.distributed_c10d
    if inner.is_mpi_available() or hasattr(inner, "ProcessGroupMPI"):
        return
    inner.ProcessGroupMPI = _Factory
    inner._new_process_group_helper = _finding_mpi(inner, inner._new_process_group_helper)  # noqa: SLF001


def _finding_mpi(inner: Any, helper: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that makes groups; others than mpi's go through it untouched."""

    @functools.wraps(helper)
    def make(
        size: int, rank: int, ranks: Sequence[int], backend: Any, store: Any, name: str, *args: Any, **named: Any
    ) -> Any:
        if MPI not in str(backend):
            return helper(size, rank, ranks, backend, store, name, *args, **named)
        config = inner.BackendConfig(inner.Backend(backend))
        backends = {device: str(one) for device, one in config.get_device_backend_map().items()}
        if MPI not in backends.values():
            return helper(size, rank, ranks, backend, store, name, *args, **named)
        if size < 0:  # the world's, which knows its ranks from MPI
            mpi = _loaded()
            size, rank, store = mpi.COMM_WORLD.size, mpi.COMM_WORLD.rank, _served(mpi)
            # torch.distributed hands its MPI no options: those of init_process_group are in its frame alone
            options = sys._getframe(1).f_locals.get("pg_options")  # noqa: SLF001
        else:
            options = named.get("backend_options")
        timeout = named.get("timeout") or timedelta(minutes=30)
        _asked.append(_Asked(name, backends, store, rank, size, timeout.total_seconds(), options))
        before, inner._MPI_AVAILABLE = inner._MPI_AVAILABLE, True  # noqa: SLF001
        try:
            made = helper(size, rank, ranks, backend, store, name, *args, **named)
        finally:
            inner._MPI_AVAILABLE = before  # noqa: SLF001
            _asked.pop()
        if set(backends.values()) == {MPI} and made[0] in inner._world.pg_map:  # noqa: SLF001
            inner._world.pg_map[made[0]] = (MPI, inner._world.pg_map[made[0]][1])  # noqa: SLF001  (whatever spelling was asked for)
        return made

    return make


class _Factory:
    """In place of torch.distributed's own class."""

    @staticmethod
    def create(ranks: Sequence[int]) -> Any:
        """Returns the group of some ranks, all of them where none is named; called by its members alone."""
        from samestep.runtime.mpi.group import MpiGroup
        from samestep.runtime.mpi.sharing import warn_of_binding

        asked = _asked[-1]
        if ranks:
            mpi = _loaded()
        else:
            mpi = _loaded(asked.rank, asked.size)
            warn_of_binding(mpi)
        names = list(ranks) or list(range(asked.size))
        options = asked.options if isinstance(asked.options, dict) else None
        return MpiGroup(mpi, names, asked.timeout_s, options, _others(asked))


def _loaded(rank: int | None = None, size: int | None = None) -> Any:
    """Returns the library; the launcher's word on rank and size is heard where the caller has none."""
    from samestep.runtime.mpi.library import load, told

    if rank is None and (place := told()) is not None:
        rank, size = place.rank, place.size
    return load(rank, size)


def _served(mpi: Any) -> Any:
    """Returns a store that rank 0 serves, at an address that all are told by MPI. Collective."""
    from torch._C._distributed_c10d import TCPStore

    from samestep.launch.address import LOOPBACK, listen
    from samestep.launch.network import addresses

    world = mpi.COMM_WORLD
    here = world.Split_type(mpi.COMM_TYPE_SHARED)
    one_host = world.allreduce(here.size == world.size, mpi.LAND)
    here.Free()
    listener = listen(LOOPBACK if one_host else addresses()[0].address) if world.rank == 0 else None
    host, port = world.bcast(None if listener is None else listener.getsockname(), 0)
    return TCPStore(
        host,
        port,
        is_master=world.rank == 0,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _others(asked: _Asked) -> dict[str, Any]:
    """Returns, by kind of device, groups of the backends that serve those devices beside MPI."""
    return {device: _plain(device, name, asked) for device, name in asked.backends.items() if name != MPI}


def _plain(device: str, name: str, asked: _Asked) -> Any:
    """Returns a group of one backend of torch.distributed's own, for one kind of device."""
    import torch
    import torch.distributed as dist

    from samestep.runtime.backend import number_collectives

    makers = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
    maker = getattr(dist, makers.get(name, ""), None)
    if maker is None:
        raise BackendError(f"beside mpi, {device} tensors can go over gloo or nccl, and not over {name!r}")
    store = dist.PrefixStore(f"beside mpi/{asked.name}/{device}", asked.store)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=asked.timeout_s)
    group = dist.ProcessGroup(store, asked.rank, asked.size)
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    backend = maker(store, asked.rank, asked.size, timeout)
    number_collectives(backend)
    group._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
    group._set_default_backend(kind)  # noqa: SLF001
    return group
