"""Commands that fix what was found; they work when pasted, for this user and this Python. `#` precedes a remark."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__: list[str] = []


def as_root(command: str, *, user: int | None = None) -> str:
    """Returns a command that only root may run, as this user runs it.

    >>> as_root("ip link set lo up", user=1000), as_root("ip link set lo up", user=0)
    ('sudo ip link set lo up', 'ip link set lo up')
    """
    return command if (os.geteuid() if user is None else user) == 0 else f"sudo {command}"


def python() -> str:
    return shlex.quote(sys.executable)


def pip(*words: str) -> str:
    """Returns the command that installs into this Python's environment."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def samestep() -> str:
    """Returns what starts this samestep: its name where a shell finds it by that."""
    found = shutil.which("samestep")
    here = found is not None and Path(found).parent == Path(sys.executable).parent
    return "samestep" if here else f"{python()} -m samestep"


def hosts_entry(entry: str, *, first: bool) -> str:
    """Returns the command that writes a line into /etc/hosts.

    Of several lines with one name the first counts. A line that must be `first` is written into the file, since in a
    container another one cannot be put in its place.
    """
    word = shlex.quote(entry)
    if not first:
        return f"echo {word} | {as_root('tee -a /etc/hosts')}"
    return f"""known=$(cat /etc/hosts); printf '%s\\n' {word} "$known" | {as_root("tee /etc/hosts")}"""


def raised(option: str, resource: str, wanted: int, hard: int) -> str:
    """Returns the command that raises a limit of this shell, as far as the hard one, -1 for none, lets `ulimit`."""
    if hard == -1 or hard >= wanted:
        return f"ulimit -{option} {wanted}"
    return (
        as_root(f"prlimit --pid $$ --{resource}={wanted}:{wanted}")
        + f"  # this shell; docker run --ulimit {resource}={wanted}"
    )
