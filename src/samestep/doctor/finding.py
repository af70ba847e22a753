"""One finding of doctor: ok, or what is wrong, what that will cause, and the command that fixes it.

The commands work when pasted, for this user and this Python. `#` precedes a remark.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from samestep.text import escape_control

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
FIELDS = ("check", "level", "text", "effect", "fix")  # of a line, in its order


@dataclass(frozen=True)
class Finding:
    check: str
    # "error" where training would fail, "warning" where it would be slow or would fail sometimes, "note" where
    # something may surprise
    level: Level
    text: str
    effect: str = ""  # what it will cause; "" where it is ok
    fix: str = ""  # a command that works when pasted; behind `#` stands a remark
    host: str = ""  # where; "" for all

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(check: str, text: str) -> Finding:
    """A line that needs nothing to be done."""
    return Finding(check, "ok", text)


def worst_level(lines: Iterable[Finding]) -> Level:
    return max((line.level for line in lines), key=LEVELS.index, default="ok")


def from_remote(host: str, found: dict[str, Any]) -> Iterator[Finding]:
    """Yields the lines that another host's doctor has told; what is in no form that is known here is passed over."""
    lines = found.get("lines")
    for line in lines if isinstance(lines, list) else ():
        if isinstance(line, dict) and line.get("level") in LEVELS:
            words = {name: escape_control(line.get(name, "")) for name in FIELDS if name != "level"}
            yield Finding(level=line["level"], host=host, **words)


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns what is seen; a look that fails itself is a line too, so that the others are still shown."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except Exception as error:  # noqa: BLE001  (a machine has more ways to be odd than are known here)
        found.append(Finding(check, "note", f"cannot be looked at: {type(error).__name__}: {error}", "unknown"))
    return found


def as_root(command: str) -> str:
    """Returns a command that only root may run, as this user runs it."""
    return command if os.geteuid() == 0 else f"sudo {command}"


def python() -> str:
    return shlex.quote(sys.executable)


def pip(*words: str) -> str:
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
    command = as_root(f"prlimit --pid $$ --{resource}={wanted}:{wanted}")
    return f"{command}  # this shell; docker run --ulimit {resource}={wanted}"
