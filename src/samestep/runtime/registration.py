"""The names `samestep` and `mpi` among torch.distributed's backends, there as soon as both have been imported.

Neither import causes the other: torch is not imported for a name, nor a process group before one is made.

torch.distributed gives the name mpi to its own class, and refuses where PyTorch was built without it. Every group of
every kind is made by one function, `_new_process_group_helper`; it is wrapped here, and for groups that name mpi it
finds our class in that one's place. `torch.distributed.is_mpi_available()` stays as it is, so that nobody chooses mpi
because samestep is there. PyTorch's MPI has no store, since MPI knows the ranks; other groups need one, so rank 0
serves one.
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

NAME, MPI = "samestep", "mpi"


def register(distributed: ModuleType) -> None:
    """Registers the backends with the module torch.distributed, once.

    Example:
        >>> import torch.distributed
        >>> register(torch.distributed)
        >>> torch.distributed.Backend("samestep")
        'samestep'
    """
    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
    inner = distributed.distributed_c10d
    if not inner.is_mpi_available():
        inner._new_process_group_helper = _with_mpi(inner, inner._new_process_group_helper)  # noqa: SLF001


def _make(group: Any, options: Any) -> Any:
    from samestep.runtime.process_group.group import SamestepGroup

    return SamestepGroup(group, options)


def _with_mpi(inner: Any, helper: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that makes groups; it passes others than mpi's on."""

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
            mpi = _load()
            size, rank, store = mpi.COMM_WORLD.size, mpi.COMM_WORLD.rank, _serve_store(mpi)
            # torch.distributed gives its MPI no options: those of init_process_group are in its frame alone
            options = sys._getframe(1).f_locals.get("pg_options")  # noqa: SLF001
        else:
            options = named.get("backend_options")
        timeout = named.get("timeout") or timedelta(minutes=30)
        inner.ProcessGroupMPI = _Factory(name, backends, store, rank, size, timeout.total_seconds(), options)
        inner._MPI_AVAILABLE = True  # noqa: SLF001
        try:
            made = helper(size, rank, ranks, backend, store, name, *args, **named)
        finally:
            inner._MPI_AVAILABLE = False  # noqa: SLF001
            del inner.ProcessGroupMPI
        if set(backends.values()) == {MPI} and made[0] in inner._world.pg_map:  # noqa: SLF001
            inner._world.pg_map[made[0]] = (MPI, inner._world.pg_map[made[0]][1])  # noqa: SLF001  (in any spelling)
        return made

    return make


@dataclass
class _Factory:
    """In place of torch.distributed's own class while it makes a group: what it was asked for."""

    name: str
    backends: dict[str, str]  # by kind of device
    store: Any
    rank: int
    size: int
    timeout_s: float
    options: Any

    def create(self, ranks: Sequence[int]) -> Any:
        """Returns the group of some ranks, all of them where none is named; called by its members alone."""
        from samestep.runtime.mpi.group import MpiGroup
        from samestep.runtime.mpi.library import warn_of_binding

        if ranks:
            mpi = _load()
        else:
            mpi = _load(self.rank, self.size)
            warn_of_binding(mpi)
        names = list(ranks) or list(range(self.size))
        options = self.options if isinstance(self.options, dict) else None
        others = {device: self._other(device, name) for device, name in self.backends.items() if name != MPI}
        return MpiGroup(mpi, names, self.timeout_s, options, others)

    def _other(self, device: str, name: str) -> Any:
        """Returns a group of one of torch.distributed's own backends, for tensors of one kind of device."""
        import torch
        import torch.distributed as dist

        from samestep.runtime.backends import number_collectives

        maker = getattr(dist, {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}.get(name, ""), None)
        if maker is None:
            raise BackendError(f"beside mpi, {device} tensors can go over gloo or nccl, and not over {name!r}")
        store = dist.PrefixStore(f"beside mpi/{self.name}/{device}", self.store)  # type: ignore[attr-defined]
        group = dist.ProcessGroup(store, self.rank, self.size)
        kind = getattr(dist.ProcessGroup.BackendType, name.upper())
        backend = maker(store, self.rank, self.size, timedelta(seconds=self.timeout_s))
        number_collectives(backend)
        group._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
        group._set_default_backend(kind)  # noqa: SLF001
        return group


def _load(rank: int | None = None, size: int | None = None) -> Any:
    from samestep.runtime.mpi.library import launcher_place, load

    if rank is None and (place := launcher_place()) is not None:
        rank, size = place.rank, place.size
    return load(rank, size)


def _serve_store(mpi: Any) -> Any:
    """Returns a store that rank 0 serves, at an address that all get by MPI. Collective."""
    from torch._C._distributed_c10d import TCPStore

    from samestep.launch.hosts.network import addresses
    from samestep.launch.rank.store import LOOPBACK, listen

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
