"""How many files a launcher may have open: as many as its ranks ask for. A rank may as many as it could without one.

    for each rank on a host            six: two streams, a control pipe, a record, stacks, a handle
    for each rank of a run             two more where it is led: logs
    usually allowed                    1024, beyond which select(2) cannot go, so scripts must not be given more

torchrun gives its workers no pipes unless it is told to keep logs.
"""

from __future__ import annotations

import contextlib
import resource

__all__: list[str] = []

MOST = 1 << 16  # of ten thousand ranks; in containers the hard limit may be a thousand million

_before: list[tuple[int, int]] = []  # soft and hard limit, where this process has raised its own


def raise_limit() -> None:
    """Lets this process open as many files as it may be allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        _before[:] = _before or [(soft, hard)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def lower_again(process: int = 0) -> None:
    """Gives a child of this process, or this one, which is a fork, the limit that there was."""
    for limits in _before:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
