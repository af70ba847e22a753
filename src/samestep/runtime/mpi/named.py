"""What a process group is called. C++ keeps the names in a backend of its own, and a group of Python's has none.

Without them functional collectives, DTensor and FSDP say "ProcessGroup name not set".
"""

from __future__ import annotations

import torch.distributed as dist

__all__: list[str] = []


class Named(dist.ProcessGroup):
    """A process group of Python's that knows its name.

    Args:
        rank: this process's number in the group.
        size: the number of members.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only form that a subclass can use
        self._name = ""
        self._about = ""

    def getBackendName(self) -> str:  # noqa: N802  (C++ asks for it)
        """Returns "mpi"."""
        return "mpi"

    def getGroupName(self) -> str:  # noqa: N802  (C++ keeps it in a backend, and there is none)
        """Returns what torch.distributed calls this group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Is told what torch.distributed calls this group."""
        self._name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a name of its own for strings
        """What torch.distributed calls this group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Returns what its maker says of it."""
        return self._about

    def setGroupDesc(self, about: str) -> None:  # noqa: N802
        """Is told what its maker says of it."""
        self._about = about

    def _set_group_desc(self, desc: str) -> None:
        self._about = desc

    @property
    def group_desc(self) -> str:
        """What its maker says of it."""
        return self._about
